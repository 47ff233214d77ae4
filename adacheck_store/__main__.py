"""``python -m adacheck_store`` is the command line."""

from adacheck_store.cli import main

if __name__ == "__main__":
    main(prog_name="adacheck-store")
