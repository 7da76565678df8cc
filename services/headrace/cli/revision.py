"""`headrace revision`: join an artifact and the way it runs into what serves."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from headrace.adapters.execution_codec import execution_from_proto
from headrace.adapters.route_codec import artifact_from_proto
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.cli import manifests
from headrace.cli.artifact import LABELS
from headrace.cli.places import find
from headrace.cli.problems import EXIT_USAGE, Problem, from_failure
from headrace.cli.registration import CALL_S, Admin, Execution, full_artifact, model_id
from headrace.cli.show import print_json
from headrace.cli.status import table
from headrace.cli.templates import template_problem
from headrace.control import compatibility
from headrace.control.engine_settings import DTYPES
from headrace.control.errors import InvalidRequest, Violation
from headrace.control.resources import Abort, Artifact, DraftMethod, Engine, Labels
from headrace.control.resources import Execution as Runs

F = TypeVar("F", bound=Callable[..., Any])

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON; the default when piped.")
_DEFAULT = Execution()
_ENGINES: dict[str, resources_pb2.Execution.Engine] = {
    one.value: getattr(resources_pb2.Execution, f"ENGINE_{one.name}") for one in Engine
}


@click.group(short_help="Register how an artifact runs, and look at it.")
def revision() -> None:
    """Join an artifact and the way it runs into a revision: exactly what serves, under a name made of all of it.

    \b
    headrace revision create chat --artifact artifacts/0123456789ab --context 4096 --alias chat
    headrace revision list --model chat
    """  # noqa: D301


def _number(name: str, field: str, lowest: int, text: str) -> Callable[[F], F]:
    default = getattr(_DEFAULT, field)
    return click.option(name, field, type=click.IntRange(lowest), default=default, show_default=True, help=text)


@revision.command(short_help="Register a revision of a model.")
@click.argument("model")
@click.option(
    "--artifact", "artifact_name", metavar="NAME", default="", help="The files; none for the synthetic engine."
)
@click.option("--engine", type=click.Choice(list(_ENGINES)), default="llamacpp", show_default=True,
              help="What computes; a Scheduler runs the GPU engines only if its settings name them.")  # fmt: skip
@_number("--context", "context_tokens", 1, "Most tokens of one request, prompt and output.")
@_number("--slots", "slots", 1, "Requests that run at a time.")
@_number("--kv-cells", "kv_cells", 1, "KV cache that all requests share, tokens.")
@_number("--prefill-chunk", "prefill_chunk", 1, "Prompt tokens of one step.")
@_number("--threads", "threads", 0, "Compute threads; 0 lets the Scheduler choose.")
@_number("--run-ahead", "run_ahead_tokens", 0, "Tokens computed without credit, for engines that cannot pause.")
@_number("--tensor-parallel", "tensor_parallel", 0, "GPUs that share each layer; 0 or 1: one.")
@_number("--pipeline-parallel", "pipeline_parallel", 0, "GPUs that share the layers; 0 or 1: one.")
@click.option("--device", default="", metavar="NAME", help="What it needs: cpu, cuda-sm90, ... Default: cpu.")
@_number("--gpus", "gpus", 0, "GPU engines: GPUs of one worker; 0: as many as share a layer.")
@click.option("--gpu-memory-fraction", type=click.FloatRange(0, 1), default=0.0, metavar="SHARE",
              help="GPU engines: share of each GPU's memory that it may take. Default: 0.9.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", show_default=True,
              help="GPU engines: type that is computed in.")  # fmt: skip
@click.option("--kv-events", is_flag=True, help="GPU engines: count what the prefix cache stores and removes.")
@click.option("--abort", type=click.Choice([one.value for one in Abort]),
              help="GPU engines: when one request may be ended early. Default: what is held for safe.")  # fmt: skip
@click.option("--eager", is_flag=True, help="GPU engines: no compilation, no CUDA graphs; starts sooner, runs slower.")
@click.option("--speculative", type=click.Choice([one.value for one in DraftMethod]),
              help="GPU engines: speculative decoding, and who drafts. Default: none.")  # fmt: skip
@_number("--draft-tokens", "draft_tokens", 0, "Tokens that are drafted for each step, 1 to 64.")
@click.option("--draft-artifact", metavar="NAME", default="", help="The files of a draft_model or an eagle3.")
@_number("--ngram-max", "ngram_max", 0, "Longest run of tokens that ngram looks up; 0: 4.")
@click.option("--prefill-rate", "prefill_tokens_per_s", type=float, default=0.0, metavar="TOKENS/S",
              help="Synthetic engine: prompt tokens a second; 0: at once.")  # fmt: skip
@click.option("--decode-rate", "decode_tokens_per_s", type=float, default=0.0, metavar="TOKENS/S",
              help="Synthetic engine: tokens a second; 0: as fast as it can.")  # fmt: skip
@click.option("--max-output", "max_output_tokens", type=click.IntRange(0), default=0, metavar="TOKENS",
              help="Most tokens that a request may ask for. Default: what the context leaves.")  # fmt: skip
@click.option(
    "--runtime",
    default="",
    metavar="NAME",
    help="Environment that it was made for; Schedulers with another one refuse it, and name theirs. Default: any.",
)
@click.option("--policy-version", type=click.IntRange(0), default=0, help="Version of the request policy.")
@LABELS
@click.option("--alias", metavar="NAME", default="", help="Point this alias at it.")
def create(
    model: str,
    artifact_name: str,
    engine: str,
    max_output_tokens: int,
    runtime: str,
    policy_version: int,
    labels: Labels,
    alias: str,
    **execution: Any,
) -> None:
    """Register a revision of MODEL, and print its name. The same content again changes nothing.

    It is refused, with every reason, if the files' own facts say that it cannot run so: heads and layers that do not
    divide, weights that the device has no kernels for, a context that the model was not trained for, an adapter of
    another base, a tokenizer of another model, a chat template that does not render, an adapter for another kind of
    model. The last two are only looked at if the files can be read here.
    """
    name = model_id(model.removeprefix("models/"), Path(model))
    pointed = model_id(alias.removeprefix("aliases/"), Path(alias)) if alias else ""
    runs = Execution(**{name: value for name, value in execution.items() if value is not None})
    with Admin(find().registry) as admin:
        files = admin.artifact(artifact_name) if artifact_name else None
        drafts = admin.artifact(runs.draft_artifact) if runs.draft_artifact else None
        asked = execution_from_proto(runs.to_proto(_ENGINES[engine]))
        if files is not None:
            _check(artifact_from_proto(files), asked, artifact_from_proto(drafts) if drafts is not None else None)
        made = resources_pb2.Revision(
            artifact=full_artifact(artifact_name) if artifact_name else "",
            execution=runs.to_proto(_ENGINES[engine]),
            policy=resources_pb2.RequestPolicy(max_output_tokens=max_output_tokens),
            labels=dict(labels),
            runtime=runtime,
            policy_version=policy_version,
        )
        stored = admin.create_revision(name, made)
        if pointed:
            admin.set_alias(pointed, stored)
    click.echo(stored)


def _check(artifact: Artifact, execution: Runs, draft: Artifact | None) -> None:
    """Refuse here what the Registry would refuse, together with what only the files themselves can show."""
    reasons = list(compatibility.incompatibilities(artifact, execution, draft))
    misfit = compatibility.misfit(manifests.adapter_facts(artifact), artifact.facts)
    if misfit is not None:
        reasons.append(misfit)
    template = manifests.chat_template(artifact.files, Path(artifact.location))
    if template:
        try:
            problem = template_problem(template)
        except ImportError:
            problem = ""
            click.echo("headrace: the chat template was not tried: Jinja is not installed here", err=True)
        if problem:
            reasons.append(Violation("artifact", problem))
    if reasons:
        refusal = InvalidRequest(tuple(dataclasses.replace(r, field=f"revision.{r.field}") for r in reasons))
        text = "".join(f"\n  {v.field}: {v.description}" for v in refusal.violations)
        raise Problem(f"{artifact.name} cannot run so:{text}", hint=from_failure(refusal).hint, code=EXIT_USAGE)
    for note in compatibility.notes(artifact.facts, execution):
        click.echo(f"headrace: note: {note}", err=True)


@revision.command("list", short_help="List revisions.")
@click.option("--model", metavar="MODEL", default="", help="Only revisions of this model.")
@LABELS
@_JSON
def list_revisions(model: str, labels: Labels, as_json: bool) -> None:
    """List the revisions that are registered: all, those of one model, those with all the labels."""
    with Admin(find().registry) as admin:
        found = admin.revisions(model.removeprefix("models/"), dict(labels))
    if as_json or not sys.stdout.isatty():
        print_json([_document(r) for r in found])
        return
    rows = [
        {
            "name": r.name,
            "engine": _engine(r),
            "context": r.execution.context_tokens,
            "slots": r.execution.slots,
            "artifact": r.artifact,
            "labels": ", ".join(f"{k}={v}" for k, v in sorted(r.labels.items())),
        }
        for r in found
    ]
    console = Console(highlight=False)
    console.print(table("revision", rows, ("name", "engine", "context", "slots", "artifact", "labels")))


@revision.command(short_help="Show a revision.")
@click.argument("name")
@_JSON
def show(name: str, as_json: bool) -> None:
    """Show the revision NAME ("models/.../revisions/..."): its artifact, how it runs, its bounds."""
    with Admin(find().registry) as admin:
        document = _document(admin.revision(name))
    if as_json or not sys.stdout.isatty():
        print_json(document)
        return
    flat = {**document, **document.pop("execution", {}), **document.pop("policy", {})}
    flat |= flat.pop("speculative", {})
    rows = [{"name": key, "value": str(value)} for key, value in flat.items() if not isinstance(value, dict)]
    Console(highlight=False).print(table("revision", rows, ("name", "value")))


@revision.command(short_help="Forget a revision.")
@click.argument("name")
def delete(name: str) -> None:
    """Forget the revision NAME, if no alias names it, no worker serves it, and no snapshot that is kept has it."""
    with Admin(find().registry) as admin, admin.errors():
        admin.stub.DeleteRevision(pb.DeleteRevisionRequest(name=name), timeout=CALL_S)
    click.echo(f"deleted {name}")


def _document(message: resources_pb2.Revision) -> dict[str, Any]:
    document: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    document["execution"]["engine"] = _engine(message)
    return document


def _engine(message: resources_pb2.Revision) -> str:
    return resources_pb2.Execution.Engine.Name(message.execution.engine).removeprefix("ENGINE_").lower()
