"""All commands, in the order in which ``edgefl --help`` lists them."""

from __future__ import annotations

from edgefl.cli import bare_app
from edgefl.cli.analysis import heterogeneity, personalize
from edgefl.cli.catalog import inspection
from edgefl.cli.device import agent, data, tune
from edgefl.cli.federation import broker, dashboard, evaluate, replay, run, server, simulate, statistics
from edgefl.cli.identity import enroll
from edgefl.cli.models import check, deploy, export, plan, profile, verify
from edgefl.cli.options import ShortHelp, help_of

app = bare_app()
for panel, groups, commands in (
    (
        "Train",
        (),
        (
            *(run.run, simulate.simulate, evaluate.evaluate, statistics.statistics),
            *(server.server, broker.broker),
        ),
    ),
    ("Devices", (agent, enroll, data), (tune.tune,)),
    ("Models", (), (check.check, plan.plan, export.export, verify.verify, deploy.deploy, profile.profile)),
    ("Fleet", (replay,), (dashboard.dashboard, broker.mirror, broker.acl, replay.replay)),
    (
        "Inspect",
        (),
        (
            *(inspection.ls, inspection.inspect, inspection.validate, inspection.cache),
            *(heterogeneity.heterogeneity, personalize.personalize),
        ),
    ),
):
    for group in groups:
        known = len(app.registered_groups)
        group.register(app)
        for registered in app.registered_groups[known:]:
            registered.rich_help_panel = panel
    for command in commands:
        app.command(rich_help_panel=panel, help=help_of(command), cls=ShortHelp)(command)

__all__ = ["app"]
