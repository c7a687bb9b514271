"""All commands, in the order in which ``edgefl --help`` lists them."""

from __future__ import annotations

from edgefl.cli import bare_app
from edgefl.cli.analysis import heterogeneity, personalize, reproduce
from edgefl.cli.bench import measure as bench
from edgefl.cli.catalog import cache, inspection
from edgefl.cli.conformance import check as conformance
from edgefl.cli.device import agent as device
from edgefl.cli.device import data, tune
from edgefl.cli.federation import broker, dashboard, load, replay, run, server, simulate
from edgefl.cli.identity import enroll
from edgefl.cli.models import check, deploy, export, plan, profile, verify

app = bare_app()
for command in (
    run.run,
    simulate.simulate,
    broker.broker,
    broker.acl,
    server.server,
    load.mirror,
    load.load,
    replay.replay,
    dashboard.dashboard,
    check.check,
    plan.plan,
    export.export,
    deploy.deploy,
    verify.verify,
    profile.profile,
    tune.tune,
    inspection.ls,
    inspection.inspect,
    inspection.validate,
    cache.cache,
    heterogeneity.heterogeneity,
    personalize.personalize,
    reproduce.reproduce,
):
    app.command()(command)
for group in (replay, device, enroll, data, conformance, bench):
    group.register(app)

__all__ = ["app"]
