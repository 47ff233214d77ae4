"""The command line, adacheck-store VERB STORE_URL."""

import click

from adacheck_store import __version__


@click.group()
@click.version_option(__version__, prog_name="adacheck-store")
def main() -> None:
    """Keep a checkpoint of a training run at every step, and restore it bit for bit."""
