import pytest

from dcformer.ops.mixers import MIXERS
from dcformer.testing import make_inputs


@pytest.fixture(autouse=True)
def backend_serves_here(request):
    """Skips a test of a backend that this machine cannot run, with the backend's reason."""
    backend = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    if backend == "triton" and (reason := MIXERS[backend].refuses(_call())):
        pytest.skip(reason)


def _call():
    from dcformer.ops.api import _call

    return _call(*make_inputs(T=1).call(), None, None, False, None, None, 0.0)
