"""All commands, in the order in which ``edgefl --help`` lists them."""

from __future__ import annotations

from edgefl.cli import bare_app
from edgefl.cli.analysis import heterogeneity, personalize
from edgefl.cli.catalog import cache, inspection
from edgefl.cli.device import agent as device
from edgefl.cli.device import data, tune
from edgefl.cli.federation import broker, dashboard, mirror, replay, run, server, simulate
from edgefl.cli.identity import enroll
from edgefl.cli.models import check, deploy, export, plan, profile, verify
from edgefl.cli.options import help_of

TRAIN, COMPILE, INSPECT, DEVICES, STUDY = (
    "Train a federation",
    "Compile and deploy models",
    "Look things up",
    "Devices",
    "Study",
)
"""Panels of ``edgefl --help``."""

app = bare_app()
for command, panel in (
    (run.run, TRAIN),
    (simulate.simulate, TRAIN),
    (server.server, TRAIN),
    (broker.broker, TRAIN),
    (broker.acl, TRAIN),
    (mirror.mirror, TRAIN),
    (dashboard.dashboard, TRAIN),
    (replay.replay, TRAIN),
    (check.check, COMPILE),
    (plan.plan, COMPILE),
    (export.export, COMPILE),
    (verify.verify, COMPILE),
    (deploy.deploy, COMPILE),
    (profile.profile, COMPILE),
    (tune.tune, COMPILE),
    (inspection.ls, INSPECT),
    (inspection.inspect, INSPECT),
    (inspection.validate, INSPECT),
    (cache.cache, INSPECT),
    (heterogeneity.heterogeneity, STUDY),
    (personalize.personalize, STUDY),
):
    app.command(rich_help_panel=panel, help=help_of(command))(command)
for group, panel in (
    (replay, TRAIN),
    (device, DEVICES),
    (enroll, DEVICES),
    (data, DEVICES),
):
    known = len(app.registered_groups)
    group.register(app)
    for registered in app.registered_groups[known:]:
        registered.rich_help_panel = panel

__all__ = ["app"]
