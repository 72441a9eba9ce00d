"""``anabranch serve``: one model behind the HTTP interfaces of OpenAI and Anthropic.

    request --fields--> a checked body --chat | completions | messages | responses--> a Call: prompts and options
    Call --service--> jobs --worker--> chunks of text, in the thread that owns the model
    chunks --calls--> text and tool calls --the interface--> JSON, or server-sent events

HTTP, events and metrics come from FastAPI, uvicorn, sse-starlette and prometheus-client, which the extra ``serve``
installs; nothing but ``settings`` and ``presets`` can be imported without them.
"""
