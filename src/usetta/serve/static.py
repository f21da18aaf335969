"""The web page at `/` and the one about the API at `/docs`: plain files that are clients of the public API.

They need no key, because they hold nothing but what anybody can install; the API that they call does. The content
security policy makes a browser refuse every script, style, image and request that is not from this server.
"""

from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import Response

from usetta.serve.schemas import ApiError

_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}

ROUTE = "/page/{name:path}"
"""Scripts, styles and images of the pages."""
_PAGES = {"/": "index.html", "/docs": "docs.html"}
_FILES = (
    *("page.css", "docs.css", "api.js", "page.js", "answer.js", "figure.js", "docs.js", "icon.svg"),
    *(f"examples/{name}.jpg" for name in ("cat", "coffee", "rocket")),
)
PATHS = frozenset({*_PAGES, *(f"/page/{name}" for name in _FILES)})
"""All that is served here."""


def add_pages(app: FastAPI) -> None:
    """Put the pages on `app`."""
    folder = files("usetta.serve") / "page"
    contents = {name: (folder / name).read_bytes() for name in (*_PAGES.values(), *_FILES)}

    def respond(name: str) -> Response:
        media_type = _TYPES.get(name.rpartition(".")[2], "image/jpeg")
        return Response(contents[name], media_type=media_type, headers=_HEADERS)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return respond(_PAGES["/"])

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return respond(_PAGES["/docs"])

    @app.get(ROUTE, include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in _FILES:
            raise ApiError(404, "not_found", "Not Found")
        return respond(name)
