import pytest

from dcformer.cli import run


@pytest.fixture
def call(monkeypatch, capfd):
    """Runs the command line; gives exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return stop.value.code or 0, out, err

    return call
