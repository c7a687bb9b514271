"""All commands, in the order in which ``edgefl --help`` lists them."""

from __future__ import annotations

from edgefl.cli import (
    bench,
    broker,
    catalog,
    deploy,
    device,
    export,
    heterogeneity,
    personalize,
    plan,
    profile,
    reproduce,
    run,
    server,
    verify,
)
from edgefl.cli.empty import empty

app = empty()
for module in (
    run,
    broker,
    server,
    device,
    plan,
    export,
    deploy,
    verify,
    profile,
    catalog,
    bench,
    heterogeneity,
    personalize,
    reproduce,
):
    module.register(app)

__all__ = ["app"]
