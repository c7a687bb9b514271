"""Table of a federation file for the processes that receive updates."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from edgefl.config.tables import Table


class ServerTable(Table):
    """Processes that receive updates: the server itself, or workers. The trained weights do not depend on it."""

    workers: int = Field(
        0,
        ge=0,
        le=64,
        description=(
            "processes that take the updates of a part of the devices each; 0 or 1: the server does. The model has the same "
            "bits with any number"
        ),
    )
    ray: str = Field(
        "",
        description='address of a Ray cluster, on which workers are actors; "local": started for the server; "": processes',
    )
    updates: str = Field(
        "",
        description=(
            "where the bytes of the open round's updates go, below the federation's name: a folder, or an fsspec URL such "
            "as s3://bucket/run; default: a folder of the run. Workers on several machines need one that all of them reach"
        ),
    )

    @field_validator("updates")
    @classmethod
    def _no_password(cls, place: str) -> str:
        if "@" in urlsplit(place).netloc:
            raise ValueError(
                "a place without user and password: this file is passed on; give these by the environment of fsspec's "
                "file system, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        return place
