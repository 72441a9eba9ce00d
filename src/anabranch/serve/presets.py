"""The lines that make clients use a server, for ``anabranch serve --preset`` and docs/clients.md."""

from __future__ import annotations

from typing import NamedTuple

from anabranch.errors import InputError

__all__ = ["PRESETS", "Preset", "lines", "preset_of"]


class Preset(NamedTuple):
    """A client's configuration.

    place   where its lines go: a file, or "" for a shell
    syntax  of the lines
    text    {url}, {model} and {key} are replaced; lines that begin with "with a key: " are left out without one
    """

    title: str
    place: str
    syntax: str
    text: str


KEYED = "with a key: "
PRESETS = {
    "curl": Preset(
        "curl",
        "",
        "console",
        """\
curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
with a key:   -H 'Authorization: Bearer {key}' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Name three rivers."}}], "stream": true}}'
""",
    ),
    "open-webui": Preset(
        "Open WebUI",
        "",
        "console",
        """\
OPENAI_API_BASE_URL={url}/v1 OPENAI_API_KEY={key} open-webui serve
""",
    ),
    "continue": Preset(
        "Continue",
        "~/.continue/config.yaml",
        "yaml",
        """\
name: anabranch
version: 1.0.0
schema: v1
models:
  - name: anabranch
    provider: openai
    model: {model}
    apiBase: {url}/v1
    apiKey: {key}
    roles: [chat, edit]
""",
    ),
    "aider": Preset(
        "aider",
        "",
        "console",
        """\
OPENAI_API_BASE={url}/v1 OPENAI_API_KEY={key} aider --model openai/{model}
""",
    ),
    "codex": Preset(
        "Codex",
        "~/.codex/config.toml",
        "toml",
        """\
model = "{model}"
model_provider = "anabranch"

[model_providers.anabranch]
name = "anabranch"
base_url = "{url}/v1"
wire_api = "responses"
with a key: env_key = "ANABRANCH_API_KEY" # the variable that has {key}
""",
    ),
    "claude-code": Preset(
        "Claude Code",
        "",
        "console",
        """\
ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} claude
""",
    ),
    "llm": Preset(
        "llm",
        "extra-openai-models.yaml in the folder of 'llm logs path'",
        "yaml",
        """\
- model_id: served
  model_name: {model}
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
with a key:   api_key_name: served # llm keys set served --value {key}
""",
    ),
}


def preset_of(name: str) -> Preset:
    """The preset of this name. Raises InputError for an unknown one."""
    if name not in PRESETS:
        raise InputError(f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def lines(preset: Preset, url: str, model: str, *, key: str | None) -> str:
    """The lines for the server at ``url``; ``key`` stands for an API key, None: the server needs none."""
    kept = [line for line in preset.text.splitlines(keepends=True) if key is not None or not line.startswith(KEYED)]
    text = "".join(line.removeprefix(KEYED) for line in kept)
    return text.format(url=url, model=model, key="any" if key is None else key)
