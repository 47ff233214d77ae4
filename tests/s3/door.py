"""The back door of the zarr tier on S3: its objects in a folder, by a plain client, and back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3

from adacheck_store.format.record import Record
from adacheck_store.tiers.s3_place import parse_s3
from tests.conformance.doors import ZarrDoor


class S3Door:
    """Does what `ZarrDoor` does to a folder."""

    def __init__(self, url: str) -> None:
        self.place = parse_s3(url)
        self.client = boto3.client("s3", endpoint_url=self.place.endpoint, region_name="us-east-1")

    def names(self) -> list[str]:
        """Names of all objects."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.place.bucket, Prefix=self.place.key("")
        )
        return [
            item["Key"].removeprefix(self.place.key(""))
            for page in pages for item in page.get("Contents", [])
        ]  # fmt: skip

    def get(self, name: str) -> bytes:
        """An object."""
        found = self.client.get_object(Bucket=self.place.bucket, Key=self.place.key(name))
        data: bytes = found["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        """Replace an object."""
        self.client.put_object(Bucket=self.place.bucket, Key=self.place.key(name), Body=data)

    def delete(self, name: str) -> None:
        """Delete an object."""
        self.client.delete_object(Bucket=self.place.bucket, Key=self.place.key(name))

    def _in_a_folder(self, act: Callable[[ZarrDoor], Any]) -> Any:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            before = {name: self.get(name) for name in self.names()}
            for name, data in before.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            found = act(ZarrDoor(folder))
            files = [file for file in folder.rglob("*") if file.is_file()]
            after = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
            for name in before.keys() - after.keys():
                self.delete(name)
            for name, data in after.items():
                if before.get(name) != data:
                    self.put(name, data)
        return found

    def load(self, key: str) -> dict[str, bytes]:
        """See `Door`."""
        found: dict[str, bytes] = self._in_a_folder(lambda door: door.load(key))
        return found

    def store(self, key: str, record: Record) -> None:
        """See `Door`."""
        self._in_a_folder(lambda door: door.store(key, record))

    def damage(self, key: str, array: str, how: str) -> None:
        """See `Door`."""
        self._in_a_folder(lambda door: door.damage(key, array, how))

    def damage_head(self, key: str) -> None:
        """See `Door`."""
        self._in_a_folder(lambda door: door.damage_head(key))

    def leftovers(self) -> list[str]:
        """See `Door`."""
        found: list[str] = self._in_a_folder(lambda door: door.leftovers())
        return found
