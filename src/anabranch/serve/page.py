"""The page at ``/``: a chat that shows how each token was drafted. Its files are plain, and load nothing else."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from anabranch.serve.failures import RequestError

__all__ = ["router"]

router = APIRouter()
FILES = {each.name: each for each in (Path(__file__).parent / "static").iterdir()}
# scripts, styles and requests of this server only: a text of the model can load and run nothing
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asks again, by its ETag
}


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def index() -> Response:
    """The page."""
    return FileResponse(FILES["index.html"], headers=HEADERS)


@router.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def file(name: str) -> Response:
    """A script, the style or the icon of the page."""
    if name not in FILES:
        raise RequestError(404, f"there is no /page/{name} here")
    return FileResponse(FILES[name], headers=HEADERS)
