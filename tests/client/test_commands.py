"""`headrace generate --resume` and `headrace request` against a scripted service; tests/cli has the real one."""

import asyncio
import json
import os
import signal
import sys
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from support.scripted import KEPT, Play, Scripted, until

NAME = "requests/r1"


async def story(play: Play) -> None:
    """Ten words; the connection is lost once in the middle of them."""
    if not play.after:
        await play.accept(retention=KEPT)
    for number in range(play.sequence, 11):
        if number == 5 and play.after == 0:
            await play.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        await play.delta(f"w{number} ", number)
    await play.finish()


async def gone(play: Play) -> None:
    raise Failure(Reason.NOT_FOUND, "Not known.")


async def unreachable(play: Play) -> None:
    await play.context.abort(grpc.StatusCode.UNAVAILABLE, "Connection refused")


async def endless(play: Play) -> None:
    await play.accept()
    while True:
        await play.delta("a", 1)
        await asyncio.sleep(0.002)


async def begin(service: Scripted, *arguments: str) -> asyncio.subprocess.Process:
    environ = {**os.environ, "HEADRACE_ROUTER": service.target, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "headrace.cli.main", *arguments]
    return await asyncio.create_subprocess_exec(*command, env=environ, stdout=-1, stderr=-1)


async def run(service: Scripted, *arguments: str) -> tuple[int | None, str, str]:
    process = await begin(service, *arguments)
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


WORDS = "".join(f"w{number} " for number in range(1, 11))


async def test_generate_with_resume_survives_a_lost_connection(serve: Any) -> None:
    service = await serve(story)
    code, output, errors = await run(service, "generate", "hi", "--model", "m", "--resume")
    assert (code, output.strip()) == (0, WORDS.strip())
    assert f"{NAME} can be resumed for 10 s\n" in errors
    assert service.requests[0].on_disconnect == pb.ON_DISCONNECT_CONTINUE
    for fact in ("request", "proposed tokens", "generated tokens", "sent tokens", "acknowledged tokens"):
        assert f"\n{fact} " in errors


@pytest.mark.parametrize(
    ("then", "hint"), [(gone, ""), (unreachable, f"  `headrace request resume {NAME} --after 5` may go on with it\n")]
)
async def test_a_stream_lost_for_good_says_where_to_go_on_if_one_can(serve: Any, then: Any, hint: str) -> None:
    service = await serve(story, then)
    code, output, errors = await run(service, "generate", "hi", "--model", "m", "--resume", "--timeout", "1.5")
    assert code == 1
    assert output.strip() == WORDS[:11].strip()
    assert "headrace: The connection was lost and the stream could not be resumed" in errors
    assert ("may go on with it" in errors) == bool(hint)
    assert hint in errors


async def test_ctrl_c_cancels_by_a_frame_and_tells_the_cost(serve: Any) -> None:
    service = await serve(endless)
    process = await begin(service, "generate", "hi", "--model", "m")
    await until(lambda: service.calls == 1 and service.plays[0].sequence > 20, "it prints")
    process.send_signal(signal.SIGINT)
    output, errors = await process.communicate()
    assert process.returncode == 130
    assert output.startswith(b"aaaaaaaa")
    assert errors.endswith(b"headrace: cancelled\n")
    assert b"finish reason" in errors
    assert service.plays[0].cancels == 1


async def test_show_and_cancel_print_the_record(serve: Any) -> None:
    service = await serve(endless)
    service.records[NAME] = pb.Request(name=NAME, state=pb.Request.STATE_DECODE, usage=pb.Usage(generated_tokens=9))
    for command in ("show", "cancel"):
        code, output, _ = await run(service, "request", command, "r1")
        assert code == 0
        record = json.loads(output)
        assert (record["name"], record["state"], record["usage"]["generated_tokens"]) == (NAME, "decode", 9)
    assert (service.asked, service.cancelled) == ([NAME], [NAME])
    code, _, errors = await run(service, "request", "show", "requests/none")
    assert code == 2
    assert errors.startswith("headrace: NOT_FOUND: ")


async def test_resume_prints_what_follows(serve: Any) -> None:
    service = await serve(story)
    code, output, errors = await run(service, "request", "resume", NAME, "--after", "9", "--json", "--quiet")
    assert (code, errors) == (0, "")
    events = [json.loads(line) for line in output.splitlines()]
    assert [event["sequence"] for event in events] == [10, 11, 12]
    assert events[-1]["event"] == "terminal"
    code, _, errors = await run(await serve(gone), "request", "resume", NAME)
    assert code == 2
    assert errors.startswith("headrace: NOT_FOUND: ")
