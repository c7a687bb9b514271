"""Configuration files that enforce a federation's access rules on Mosquitto, EMQX, AWS IoT Core and HiveMQ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Literal, get_args
from xml.sax.saxutils import escape

from edgefl_server.access.rules import ROLES, USER, AccessRules, Role, TopicRule

BrokerName = Literal["mosquitto", "emqx", "aws", "hivemq"]
BROKERS: tuple[BrokerName, ...] = get_args(BrokerName)

_AWS_NAME = "${iot:Certificate.Subject.CommonName}"
_AWS_CLIENTS = {
    "server": "*server:{federation}",
    "asker": "profiler:{federation}:*",
    "device": "*:{federation}:" + _AWS_NAME.replace("{", "{{").replace("}", "}}"),
}
"""Client ids that each role may use, as :func:`edgefl.wire.mqtt.address.client_id` forms them."""
_TITLE = "Who may read and write what in federation"


def build_access_files(
    access: AccessRules, broker: BrokerName, *, aws: str = "REGION:ACCOUNT"
) -> Mapping[str, str]:
    """Return the access files of ``broker`` as texts, by file name. Writes nothing to disk.

    Args:
        access: Rules of the federation.
        broker: Broker whose format is used.
        aws: Region and account for the ARNs of AWS policies, joined by a colon. Other brokers ignore it.
    """
    makers: Mapping[BrokerName, Callable[[], Mapping[str, str]]] = {
        "mosquitto": lambda: {"mosquitto.acl": mosquitto(access)},
        "emqx": lambda: {"acl.conf": emqx(access)},
        "aws": lambda: {f"{role}.json": aws_policy(access, role, aws) for role in ROLES},
        "hivemq": lambda: {"credentials.xml": hivemq(access)},
    }
    return makers[broker]()


def mosquitto(access: AccessRules) -> str:
    """Return the text of Mosquitto's ``acl_file``.

    The server and the asker (the client that requests profiles) have rules for their user names. Devices share one
    pattern with their user name in it.
    """
    lines = [f"# {_TITLE} {access.federation!r}. A device's user is its name."]
    for user, role in ((access.server, "server"), (access.asker, "asker")):
        lines += [
            "",
            f"user {user}",
            *(f"topic {_may(rule)} {rule.filter}" for rule in access.of(_role(role))),
        ]
    lines += ["", '# Mosquitto warns that some of these have no %u. It has no other way to say "every user".']
    lines += [f"pattern {_may(rule)} {rule.filter.replace(USER, '%u')}" for rule in access.of("device")]
    return "\n".join(lines) + "\n"


def emqx(access: AccessRules) -> str:
    """Return the text of ``acl.conf`` of EMQX 5. EMQX applies the first rule that matches; the last one denies
    everything.
    """
    lines = [f"%% {_TITLE} {access.federation!r}. A device's user is its name."]
    for who, role in (
        (f'{{username, "{access.server}"}}', "server"),
        (f'{{username, "{access.asker}"}}', "asker"),
        ("all", "device"),
    ):
        for rule in access.of(_role(role)):
            action = {"readwrite": "all", "read": "subscribe", "write": "publish"}[_may(rule)]
            lines.append(f'{{allow, {who}, {action}, ["{rule.filter.replace(USER, "${username}")}"]}}.')
    return "\n".join([*lines, "{deny, all}."]) + "\n"


def hivemq(access: AccessRules) -> str:
    """Return the text of ``credentials.xml`` of HiveMQ's file RBAC extension.

    The file has the roles, and one example user for each role, with a placeholder instead of a password hash.
    """
    roles = []
    for role in ROLES:
        rules = "".join(_hivemq_rule(rule) for rule in access.of(role))
        roles.append(
            f"    <role>\n      <id>{role}</id>\n      <permissions>\n{rules}      </permissions>\n    </role>\n"
        )
    users = "".join(
        f"    <user>\n      <name>{escape(name)}</name>\n      <password>HASH</password>\n"
        f"      <roles><id>{role}</id></roles>\n    </user>\n"
        for name, role in ((access.server, "server"), (access.asker, "asker"), ("DEVICE", "device"))
    )
    return (
        f'<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n<!-- {_TITLE} {escape(access.federation)} -->\n'
        f"<file-rbac>\n  <users>\n{users}  </users>\n  <roles>\n{''.join(roles)}  </roles>\n</file-rbac>\n"
    )


def aws_policy(access: AccessRules, role: Role, place: str) -> str:
    """Return the policy of AWS IoT Core for clients of ``role``, as JSON text.

    Policies identify a client by the common name of its certificate. ``place`` is the region and account of the ARNs,
    joined by a colon.
    """
    arn = f"arn:aws:iot:{place}"
    clients = [f"{arn}:client/edgefl:{_AWS_CLIENTS[role]}".format(federation=access.federation)]
    rules = list(access.of(role))
    reads = _short([rule.filter for rule in rules if rule.read], reading=True)
    writes = _short([rule.filter for rule in rules if rule.write], reading=False)
    statements = [
        ("iot:Connect", clients),
        # A filter is compared as text (+ is no wildcard there), a topic with * for the levels that a filter leaves open.
        ("iot:Subscribe", [f"{arn}:topicfilter/{each}" for each in reads]),
        ("iot:Receive", [f"{arn}:topic/{each}" for each in reads]),
        (["iot:Publish", "iot:RetainPublish"], [f"{arn}:topic/{each}" for each in writes]),
    ]
    policy = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": action, "Resource": resources} for action, resources in statements
        ],
    }
    return json.dumps(policy, indent=1) + "\n"


def _short(filters: list[str], *, reading: bool) -> list[str]:
    """Return topic ``filters`` as the shorter patterns of AWS, without duplicates, because AWS limits the size of a
    policy.

    Each level ``+`` becomes ``*``. All filters below a client's own level become one pattern. ``reading`` is True for
    filters of subscriptions.
    """
    found = []
    for each in filters:
        below, own, _ = each.partition(f"{USER}/")
        if own:
            found.append(f"{below}{_AWS_NAME}/*")
        elif "/profiles/" in each or (reading and "/devices/" in each):
            found.append(f"{each.partition('/+/')[0]}/*")
        else:
            found.append(each.replace("/+/+", "/*").replace("/+", "/*"))
    return list(dict.fromkeys(found))


def _hivemq_rule(rule: TopicRule) -> str:
    activity = {"readwrite": "ALL", "read": "SUBSCRIBE", "write": "PUBLISH"}[_may(rule)]
    topic = escape(rule.filter.replace(USER, "${{username}}"))
    return f"        <permission><topic>{topic}</topic><activity>{activity}</activity></permission>\n"


def _may(rule: TopicRule) -> str:
    return "readwrite" if rule.read and rule.write else ("read" if rule.read else "write")


def _role(name: str) -> Role:
    return next(role for role in ROLES if role == name)
