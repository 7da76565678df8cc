"""Switch etcd's authentication on, with one user for Headrace. Safe to run again: it brings what is there in line.

    python etcd_auth.py etcd:2379 --root-password-file FILE --password-file FILE [--user headrace] [--prefix /headrace]

The user may read and write below the prefix and nothing else. Runs in the registry's image, before the services start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from aetcd.rpc import auth_pb2, rpc_pb2, rpc_pb2_grpc

CALL_S = 10.0
ROLE = "headrace"


class Etcd:
    """Calls of the Auth service."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._auth = rpc_pb2_grpc.AuthStub(channel)
        self._metadata: list[tuple[str, str]] = []

    def call(self, method: str, request: Any, *, unless: str = "") -> None:
        """Call; an error whose text has `unless` is no error."""
        try:
            getattr(self._auth, method)(request, timeout=CALL_S, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            if not unless or unless not in str(error.details()):
                raise

    def log_in(self, name: str, password: str) -> bool:
        """Whether authentication is on; then this user is taken from here on."""
        request = rpc_pb2.AuthenticateRequest(name=name, password=password)
        try:
            answer = self._auth.Authenticate(request, timeout=CALL_S, wait_for_ready=True)
        except grpc.RpcError as error:
            if "not enabled" in str(error.details()):
                return False
            raise
        self._metadata = [("token", answer.token)]
        return True


def enable(etcd: Etcd, *, root_password: str, user: str, password: str, prefix: str) -> str:
    """Do what is not done yet; returns what it found."""
    was_on = etcd.log_in("root", root_password)
    if not was_on:  # to change root's own password would end its session
        add_user(etcd.call, "root", root_password, "root")
    end = prefix.encode() + b"0"  # "/" + 1: all keys below the prefix
    below = auth_pb2.Permission(permType=auth_pb2.Permission.READWRITE, key=prefix.encode() + b"/", range_end=end)
    etcd.call("RoleAdd", rpc_pb2.AuthRoleAddRequest(name=ROLE), unless="already exists")
    etcd.call("RoleGrantPermission", rpc_pb2.AuthRoleGrantPermissionRequest(name=ROLE, perm=below))
    add_user(etcd.call, user, password, ROLE)
    if not was_on:
        etcd.call("AuthEnable", rpc_pb2.AuthEnableRequest())
    return "was on" if was_on else "is on now"


def add_user(call: Callable[..., None], name: str, password: str, role: str) -> None:
    """Make a user with this password and role, or bring the one that is there in line."""
    call("UserAdd", rpc_pb2.AuthUserAddRequest(name=name, password=password), unless="already exists")
    call("UserChangePassword", rpc_pb2.AuthUserChangePasswordRequest(name=name, password=password))
    call("UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user=name, role=role))


def main() -> int:
    """Parse the arguments; 0 when authentication is on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint", help="host:port of one member")
    parser.add_argument("--root-password-file", type=Path, required=True)
    parser.add_argument("--password-file", type=Path, required=True)
    parser.add_argument("--user", default="headrace")
    parser.add_argument("--prefix", default="/headrace")
    given = parser.parse_args()
    try:
        passwords = [path.read_text().rstrip("\r\n") for path in (given.root_password_file, given.password_file)]
        if not all(passwords):
            raise ValueError("a password file is empty")
        with grpc.insecure_channel(given.endpoint) as channel:
            found = enable(
                Etcd(channel),
                root_password=passwords[0],
                user=given.user,
                password=passwords[1],
                prefix=given.prefix,
            )
    except grpc.RpcError as error:
        print(f"etcd_auth: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"etcd_auth: {error}", file=sys.stderr)
        return 1
    print(f"etcd_auth: authentication {found}; user {given.user} may use {given.prefix}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
