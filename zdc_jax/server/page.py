"""Page to talk to the model: one static file that loads nothing else."""

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response


async def show_page(http: Request) -> Response:
    """Return the page. It holds no secrets, and needs no key."""
    html, policy = _load()
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(html, media_type="text/html", headers=headers)


@cache
def _load() -> tuple[str, str]:
    """Return the page and its content security policy.

    The policy allows the page's own script and style, by their hashes, and requests to this server.
    """
    html = (files("zdc_jax.server") / "page.html").read_text("utf-8")
    hashes = {tag: _hash(html, tag) for tag in ("script", "style")}
    policy = [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        *(f"{tag}-src '{digest}'" for tag, digest in hashes.items()),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return html, "; ".join(policy)


def _hash(html: str, tag: str) -> str:
    """Return the hash of the only element with a tag, as a content security policy names it."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return "sha256-" + b64encode(sha256(content.encode()).digest()).decode()
