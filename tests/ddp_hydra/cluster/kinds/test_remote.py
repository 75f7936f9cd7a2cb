from __future__ import annotations

import pytest

from ddp_hydra.cluster.kinds.local import make_security
from ddp_hydra.errors import ClusterError


def test_a_mistake_in_the_security_is_said_without_the_private_key():
    with pytest.raises(ClusterError, match=r"cluster\.security: .*tls_client_kee.*: give cluster\.security") as caught:
        make_security({"tls_client_key": "-----BEGIN PRIVATE KEY-----\nsecret", "tls_client_kee": "me.key"})
    assert "secret" not in str(caught.value)
