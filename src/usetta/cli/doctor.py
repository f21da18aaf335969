"""The command that tests an installation."""

import json

import typer

from usetta.cli.app import AsJson, app, print_rows


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Test this installation: versions, devices, precision, caches. Exit code 1 if a test fails."""
    from dataclasses import asdict

    from usetta.doctor import diagnose

    found = diagnose()
    if as_json:
        typer.echo(json.dumps(asdict(found) | {"is_well": found.is_well}, indent=1))
    else:
        typer.echo("Versions")
        typer.echo("  " + ", ".join(f"{name} {value}" for name, value in found.versions.items() if value))
        for title, rows in (("Devices", found.devices), ("Caches", found.caches)):
            typer.echo(f"\n{title}")
            print_rows(rows, as_json=False)
        typer.echo("\nTests")
        print_rows(
            [
                {"test": check.name, "result": "passed" if check.passed else "FAILED", "detail": check.detail}
                for check in found.checks
            ],
            as_json=False,
        )
    raise typer.Exit(0 if found.is_well else 1)
