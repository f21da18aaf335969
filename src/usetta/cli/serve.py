"""The command that answers over HTTP."""

import ipaddress
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from usetta.cli.app import ContextFile, Device, ModelName, Precision, app, clear_errors, echo
from usetta.serve.settings import Limits, Settings

_LIMITS, _SETTINGS = Limits(), Settings()


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    model: ModelName = _SETTINGS.model,
    precision: Precision = _SETTINGS.precision,
    device: Device = _SETTINGS.device,
    extra_model: Annotated[
        list[str] | None,
        typer.Option("--extra-model", help="Another model that requests may name; must be on this machine."),
    ] = None,
    reward_model: Annotated[
        str | None,
        typer.Option(
            help="The model that RLCF gets its rewards from; must be on this machine. Default: the same model."
        ),
    ] = None,
    context: ContextFile = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="File of `usetta calibrate`: the answers of its method have a calibrated confidence, and a threshold."
        ),
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder that keeps features of views.")] = None,
    max_upload: Annotated[int, typer.Option(help="Bytes of a request.", min=1)] = _LIMITS.upload,
    max_json: Annotated[int, typer.Option(help="Bytes of a request in JSON.", min=1)] = _LIMITS.json,
    max_pixels: Annotated[int, typer.Option(help="Pixels of an image.", min=1)] = _LIMITS.pixels,
    max_classes: Annotated[int, typer.Option(help="Classes in a request.", min=1)] = _LIMITS.classes,
    max_name_length: Annotated[
        int, typer.Option(help="Characters of a class name, a template or a method.", min=1)
    ] = _LIMITS.name_length,
    max_templates: Annotated[int, typer.Option(help="Templates in a request.", min=1)] = _LIMITS.templates,
    max_views: Annotated[int, typer.Option(help="Views of an image.", min=1)] = _LIMITS.views,
    max_steps: Annotated[int, typer.Option(help="Tuning steps of a method.", min=1)] = _LIMITS.steps,
    max_methods: Annotated[int, typer.Option(help="Methods to compare in a request.", min=1)] = _LIMITS.methods,
    max_images: Annotated[int, typer.Option(help="Images in a batch.", min=1)] = _LIMITS.images,
    max_cost: Annotated[
        int, typer.Option(help="Work for a request, in views; a step of ttl counts as all views.", min=1)
    ] = _LIMITS.cost,
    max_sessions: Annotated[int, typer.Option(help="Memories of streams that are kept.", min=1)] = _LIMITS.sessions,
    max_queue: Annotated[int, typer.Option(help="Requests at one time; more are refused.", min=1)] = _LIMITS.queue,
    max_queue_per_caller: Annotated[
        int, typer.Option(help="Requests of one caller at one time.", min=1)
    ] = _LIMITS.queue_per_caller,
    max_connections: Annotated[int, typer.Option(help="Open connections.", min=1)] = _LIMITS.connections,
    max_connections_per_address: Annotated[
        int, typer.Option(help="Open connections of one address.", min=1)
    ] = _LIMITS.connections_per_address,
    timeout: Annotated[float, typer.Option(help="Seconds for a request.", min=0.1)] = _LIMITS.seconds,
    pause: Annotated[
        float, typer.Option(help="Seconds in which nothing of a request arrives before it is given up.", min=0.1)
    ] = _LIMITS.pause,
    threads: Annotated[int, typer.Option(help="Threads that decode images and make views.", min=1)] = (
        _SETTINGS.threads
    ),
    text_memory: Annotated[
        int, typer.Option(help="Bytes for the text features of recent class lists.", min=1)
    ] = _SETTINGS.text_bytes,
    session_memory: Annotated[
        int, typer.Option(help="Bytes for what the streams of sessions have learned.", min=1)
    ] = _SETTINGS.session_bytes,
    session_idle: Annotated[
        float, typer.Option(help="Seconds after which a session that nobody uses is forgotten.", min=0.1)
    ] = _SETTINGS.session_seconds,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            help="A name by which callers address the server, besides localhost and --host; * allows all.",
        ),
    ] = None,
    page: Annotated[bool, typer.Option(help="Whether there are web pages: / to classify, /docs about the API.")] = True,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="A key that requests must send; may be repeated.", envvar="USETTA_API_KEYS"),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with one key per line.")] = None,
) -> None:
    """Answer over HTTP until SIGTERM or Ctrl-C. The log goes to standard output, one JSON object per line."""
    with clear_errors():
        settings = Settings(
            model=model,
            precision=precision,
            device=device,
            extra_models=tuple(extra_model or ()),
            reward_model=reward_model,
            context=context,
            calibration=calibration,
            cache=cache,
            keys=(*(api_key or ()), *_keys_in(api_key_file)),
            limits=Limits(
                upload=max_upload,
                json=max_json,
                pixels=max_pixels,
                classes=max_classes,
                name_length=max_name_length,
                templates=max_templates,
                views=max_views,
                steps=max_steps,
                methods=max_methods,
                images=max_images,
                cost=max_cost,
                sessions=max_sessions,
                queue=max_queue,
                queue_per_caller=max_queue_per_caller,
                seconds=timeout,
                pause=pause,
                connections=max_connections,
                connections_per_address=max_connections_per_address,
            ),
            hosts=tuple(allowed_host or ()),
            page=page,
            threads=threads,
            text_bytes=text_memory,
            session_bytes=session_memory,
            session_seconds=session_idle,
        )
        try:
            from usetta.serve.app import run
            from usetta.serve.monitoring import configure_log
        except ModuleNotFoundError as error:
            echo(f"usetta: the server needs {error.name}: pip install 'usetta[serve]'")
            raise typer.Exit(1) from error
        if not settings.keys and not _is_loopback(host):
            echo(f"usetta: WARNING: anybody who reaches {host}:{port} can use this server; set keys (--api-key-file)")
        configure_log()
        run(settings, host, port, _announcer(settings))


def _announcer(settings: Settings) -> Callable[[str], None] | None:
    """What tells a person at a terminal where the server is; the log has it for everybody else."""
    if not sys.stderr.isatty():
        return None
    return lambda url: echo(f"Open {url}" if settings.page else f"Listening on {url}")


def _keys_in(file: Path | None) -> list[str]:
    if file is None:
        return []
    keys = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not keys:
        raise ValueError(f"there is no key in {str(file)!r}")
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
