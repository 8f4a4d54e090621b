"""/docs: Swagger UI over /openapi.json, for people. The page and all that it loads come from this server, and
its policy lets the browser load from nowhere else, so that it works without a network and tells nobody what
is served here."""

import importlib.util
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, Response

ASSETS = {
    "/docs/swagger-ui.css": "text/css; charset=utf-8",
    "/docs/swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "/docs/favicon.png": "image/png",
    "/docs/start.js": "text/javascript; charset=utf-8",
}
# Swagger UI sets styles on elements and has its icons in data URLs. Paths are relative, so that the page
# works behind a prefix.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gemserve API</title>
<link rel="icon" type="image/png" href="docs/favicon.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
# Without a null there Swagger UI has its document checked by a site of its makers.
_START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
  queryConfigEnabled: false,
});
"""


def asset_folder() -> Path:
    """Of the package that brings Swagger UI along, which is not imported."""
    spec = importlib.util.find_spec("fastapi_offline")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "static"


def create_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def show_docs(request: Request) -> Response:
        return Response(
            _PAGE,
            media_type="text/html",
            headers={"content-security-policy": _POLICY, "cache-control": "no-cache"},
        )

    async def show_asset(request: Request) -> Response:
        path = request.scope["path"]
        headers = {"content-type": ASSETS[path], "x-content-type-options": "nosniff"}
        if path == "/docs/start.js":
            return Response(_START, headers=headers)
        return FileResponse(asset_folder() / path.removeprefix("/docs/"), headers=headers)

    for path in ASSETS:
        router.add_api_route(path, show_asset, methods=["GET"])
    return router
