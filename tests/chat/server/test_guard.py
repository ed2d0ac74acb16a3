"""The guard reads the body of every request that an endpoint takes."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.responses import Response

from hybridmem.chat.server.app import check_bodies, route_to


def test_an_endpoint_whose_bodies_the_guard_would_skip_cannot_be_added() -> None:

    async def answer() -> Response:
        return Response()

    app = Starlette(routes=[route_to(answer, "/v1/sessions/{id}/new", "POST")])
    check_bodies(app)
    app.routes.append(route_to(answer, "/v1/forgotten", "POST"))
    with pytest.raises(ValueError, match="/v1/forgotten"):
        check_bodies(app)
