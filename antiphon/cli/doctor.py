"""The command that describes the machine: doctor."""

from typing import Annotated

import typer

from antiphon.cli.errors import exit_on_error
from antiphon.cli.tables import print_table


def doctor(
    clean: Annotated[
        bool, typer.Option("--clean", help="First remove the weights that your killed runs left in shared memory.")
    ] = False,
) -> None:
    """Show versions, devices and optional packages on this machine, and how to install what is missing."""
    with exit_on_error():
        from antiphon.inspect.doctor import describe_hardware, describe_optional, describe_software

        if clean:
            from antiphon.weights.shared_directory import remove_abandoned_directories

            print("\n".join(["removed:", *map(str, remove_abandoned_directories())]))
        print_table("machine", "", {**describe_software(), **describe_hardware()})
        print_table("optional", "", describe_optional())
