"""The guard reads the body of every request that an endpoint takes."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from hybridmem.chat.server.app import check_bodies


def test_an_endpoint_whose_bodies_the_guard_would_skip_cannot_be_added() -> None:
    app = FastAPI()
    app.add_api_route("/v1/sessions/{id}/new", lambda: None, methods=["POST"])
    check_bodies(app)
    app.add_api_route("/v1/forgotten", lambda: None, methods=["POST"])
    with pytest.raises(ValueError, match="/v1/forgotten"):
        check_bodies(app)
