"""Where pictures may come from: by default from the request itself alone.

A server that fetches any address a client names can be made to read the network that it stands in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from stacktok.core.limits import shown

if TYPE_CHECKING:
    Base = Any
else:
    Base = MediaConnector

NAME = "stacktok"
"""The connector's name in vLLM's registry; vLLM takes it from its own variable ``VLLM_MEDIA_CONNECTOR``."""


class ClosedConnector(Base):
    """vLLM's connector, closed to addresses and files that the server's flags do not name."""

    def check(self, url: str) -> None:
        """Refuse an address."""
        scheme = url.split(":", 1)[0].lower()
        if scheme == "data":
            return
        if scheme in ("http", "https"):
            if not self.allowed_media_domains:
                raise ValueError(
                    f"the picture's address {shown(url)} is not fetched by this server; send the picture as a data "
                    "URL, or start the server with --allow-media-domain"
                )
        elif scheme == "file":
            if self.allowed_local_media_path is None:
                raise ValueError(
                    "files of the server are not read; send the picture as a data URL, or start the server with "
                    "--allowed-local-media-path"
                )
        else:
            raise ValueError(f"the picture's address {shown(url)} cannot be read; send the picture as a data URL")

    def load_from_url(self, url: str, *args: Any, **kwargs: Any) -> Any:
        """A medium behind an address."""
        self.check(url)
        return super().load_from_url(url, *args, **kwargs)

    async def load_from_url_async(self, url: str, *args: Any, **kwargs: Any) -> Any:
        """The same without blocking."""
        self.check(url)
        return await super().load_from_url_async(url, *args, **kwargs)


def register() -> None:
    """Make the connector known to vLLM."""
    MEDIA_CONNECTOR_REGISTRY.register(NAME)(ClosedConnector)
