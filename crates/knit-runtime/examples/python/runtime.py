#!/usr/bin/env python3
"""A network runtime in Python: every Network is a bridge in a network namespace of its own, every pod a port of it.

It needs grpcio, grpcio-status and the code that grpcio-tools makes from kni.proto; `ip` (iproute2), `nsenter` and `unshare`
(util-linux) do the kernel's part. From the root of the repository:

    python3 -m venv venv && venv/bin/pip install grpcio grpcio-status grpcio-tools
    venv/bin/python -m grpc_tools.protoc -I crates/knit-api/proto --python_out=venv --grpc_python_out=venv kni/v1alpha1/kni.proto
    PYTHONPATH=venv venv/bin/python crates/knit-runtime/examples/python/runtime.py \\
        /run/knit/runtimes/python.sock /run/knit-python

The first argument is the socket, the second a folder for its namespaces and for what it must remember: it may be killed at any
moment, and goes on where it was. What it does not do: cross nodes, reach the outside, keep pods apart.
"""

import hashlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status
from kni.v1alpha1 import kni_pb2 as kni
from kni.v1alpha1 import kni_pb2_grpc

NAME = "example.com/python"
FEATURES = ["NetworkSetup", "Layer2", "IPv4", "IPv6", "StaticAddress", "StaticMac", "Mtu", "Routes", "CollectGarbage"]

# The status code that goes with each reason, by the table in kni.proto.
CODES = {
    kni.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    kni.NETWORK_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    kni.ATTACHMENT_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    kni.NAMESPACE_GONE: grpc.StatusCode.FAILED_PRECONDITION,
    kni.CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    kni.IN_USE: grpc.StatusCode.FAILED_PRECONDITION,
    kni.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    kni.DAMAGED: grpc.StatusCode.FAILED_PRECONDITION,
    kni.INTERNAL: grpc.StatusCode.INTERNAL,
    kni.ADDRESS_IN_USE: grpc.StatusCode.ALREADY_EXISTS,
}


class Failure(Exception):
    """A call that failed: why, and what to do."""

    def __init__(self, reason, message):
        super().__init__(message)
        self.reason = reason

    def abort(self, context):
        detail = kni.ErrorDetail(reason=self.reason, retryable=self.reason == kni.INTERNAL, message=str(self))
        status = status_pb2.Status(code=CODES[self.reason].value[0], message=str(self))
        status.details.add().Pack(detail)
        context.abort_with_status(rpc_status.to_status(status))


def ip(namespace, *batches, read=None):
    """Runs `ip` in a namespace, with some lines of commands, or reads what it shows."""
    command = ["nsenter", f"--net={namespace}", "ip"]
    command += ["-json", *read] if read else ["-batch", "-"]
    done = subprocess.run(command, input="\n".join(batches), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failure(kni.INTERNAL, f"the kernel refused: {done.stderr.strip()}")
    return json.loads(done.stdout or "[]") if read else None


def ports(home):
    """What stands in a Network's namespace; nothing where that is gone."""
    return [link["ifname"] for link in ip(home, read=["link", "show", "type", "veth"])] if os.path.ismount(home) else []


def remove(home, port):
    """Deletes a port. When the pod's namespace goes, the kernel does so too, at any moment: for a short time such a port is
    still listed and can no longer be deleted. So what counts is that it is gone in the end."""
    deadline = time.monotonic() + 5
    while True:
        try:
            return ip(home, f"link delete {port}")
        except Failure:
            if port not in ports(home):
                return None
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def inode(path):
    """The network namespace at a path."""
    try:
        return os.stat(path).st_ino
    except OSError as error:
        raise Failure(kni.NAMESPACE_GONE, f"the pod's network namespace cannot be opened: {error}") from error


def check(request, pod):
    """What cannot be right, however often it is repeated."""
    if not pod.sandbox_id or not pod.netns_path:
        raise Failure(kni.INVALID, "pod: sandbox_id and netns_path are needed")
    if not 0 < len(request.interface) <= 15 or "/" in request.interface or request.interface in ("lo", ".", ".."):
        raise Failure(kni.INVALID, f"{request.interface!r} cannot be the name of an interface")
    if not request.addresses:
        raise Failure(kni.INVALID, "no address: the agent chooses one per family")
    for address in request.addresses:
        try:
            ipaddress.ip_interface(f"{address.ip}/{address.prefix}")
        except ValueError as error:
            raise Failure(kni.INVALID, f"address.ip: {error}") from error


class Runtime(kni_pb2_grpc.NetworkRuntimeServicer):
    """All calls take turns; the state is on disk before an answer goes out."""

    def __init__(self, folder):
        self.folder = folder
        self.file = os.path.join(folder, "state")
        self.lock = threading.Lock()
        self.networks = {}
        self.made = {}
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.path.exists(self.file):
            with open(self.file, encoding="utf-8") as file:
                state = json.load(file)
            self.networks = {name: kni.Network.FromString(bytes.fromhex(hex_)) for name, hex_ in state["networks"].items()}
            for request, attachment in state["made"]:
                self.remember(
                    kni.AttachRequest.FromString(bytes.fromhex(request)),
                    kni.Attachment.FromString(bytes.fromhex(attachment)),
                )

        # A port that nobody remembers was being made when this program was killed.
        known = {attachment.host_interface for _, attachment in self.made.values()}
        for home in map(self.home, self.networks):
            for port in ports(home):
                if port not in known:
                    remove(home, port)

    def remember(self, request, attachment):
        self.made[(attachment.sandbox_id, attachment.interface)] = (request, attachment)

    def save(self):
        state = {
            "networks": {name: network.SerializeToString().hex() for name, network in self.networks.items()},
            "made": [[r.SerializeToString().hex(), a.SerializeToString().hex()] for r, a in self.made.values()],
        }
        with open(self.file + ".new", "w", encoding="utf-8") as file:
            json.dump(state, file)
        os.rename(self.file + ".new", self.file)

    def home(self, network):
        """Where a Network's namespace is mounted."""
        return os.path.join(self.folder, f"net-{network}")

    # Calls about Networks.

    def setup(self, network):
        if network.topology != kni.LAYER2:
            raise Failure(kni.UNSUPPORTED, "this runtime has bridges only: use topology Layer2")
        home = self.home(network.name)
        if not os.path.ismount(home):
            with open(home, "w", encoding="utf-8"):
                pass
            subprocess.run(["unshare", f"--net={home}", "true"], check=True)
        bridge = [link for link in ip(home, read=["link", "show"]) if link["ifname"] == "bridge"]
        if not bridge:
            ip(home, "link add bridge type bridge")
        gateways = [
            f"address replace {s.gateway}/{s.cidr.split('/')[1]} dev bridge {'nodad' if ':' in s.gateway else ''}"
            for s in network.subnets
        ]
        ip(home, "link set bridge up", *gateways)
        self.networks[network.name] = network
        self.save()

    def remove(self, name):
        if any(attachment.network == name for _, attachment in self.made.values()):
            raise Failure(kni.IN_USE, f"pods are attached to {name}: detach them first")
        self.networks.pop(name, None)
        self.save()
        home = self.home(name)
        if os.path.ismount(home):
            subprocess.run(["umount", home], check=True)
        if os.path.exists(home):
            os.unlink(home)

    # Calls about pods.

    def attach(self, pod, request):
        """One interface, and whether it is new."""
        check(request, pod)
        asked = kni.AttachRequest(pod=pod, attachments=[request])
        space = inode(pod.netns_path)
        before = self.made.get((pod.sandbox_id, request.interface))
        if before:
            if before[0] == asked and before[1].pod_netns_inode == space:
                return before[1], False
            raise Failure(kni.CONFLICT, f"{request.interface} already exists and differs: detach it first")
        network = self.networks.get(request.network)
        if network is None:
            raise Failure(kni.NETWORK_NOT_FOUND, f"Network {request.network!r} is not set up")
        home = self.home(network.name)
        mtu = network.mtu or 1500
        port = "p" + hashlib.sha256(f"{pod.sandbox_id} {request.interface}".encode()).hexdigest()[:12]
        mac = f"address {request.mac}" if request.mac else ""
        peer = f"peer name {request.interface} {mac} mtu {mtu} netns {pod.netns_path}"
        ip(home, f"link add {port} mtu {mtu} type veth {peer}", f"link set {port} master bridge up")
        try:
            routes = self.configure(network, pod, request)
            inside = ip(pod.netns_path, read=["link", "show", "dev", request.interface])[0]
            outside = ip(home, read=["link", "show", "dev", port])[0]
        except Exception:
            remove(home, port)
            raise
        attachment = kni.Attachment(
            sandbox_id=pod.sandbox_id,
            network=network.name,
            interface=request.interface,
            addresses=request.addresses,
            mac=inside["address"],
            mtu=inside["mtu"],
            routes=routes,
            dns=request.dns,
            host_interface=port,
            host_index=outside["ifindex"],
            host_netns_path=home,
            host_netns_inode=inode(home),
            pod_netns_inode=space,
            pod=kni.Pod(namespace=pod.namespace, name=pod.name, uid=pod.uid, sandbox_id=pod.sandbox_id),
        )
        self.remember(asked, attachment)
        self.save()
        return attachment, True

    def configure(self, network, pod, request):
        """Everything inside the pod; the routes that go out there."""
        gateways = {":" in a.ip: a.gateway for a in request.addresses}
        routes = [*network.routes, *request.routes]
        if request.default_route:
            routes += [kni.Route(destination="::/0" if v6 else "0.0.0.0/0", via=via) for v6, via in gateways.items()]
        name = request.interface
        lines = [f"link set {name} up"]
        for address in request.addresses:
            nodad = "nodad" if ":" in address.ip else ""
            lines.append(f"address add {address.ip}/{address.prefix} dev {name} {nodad}")
        for route in routes:
            if not route.via:
                route.via = gateways.get(":" in route.destination, "")
            lines.append(f"route add {route.destination} via {route.via} dev {name}")
        ip(pod.netns_path, *lines)
        return routes

    def detach(self, sandbox, interfaces):
        gone = []
        for key in [key for key in self.made if key[0] == sandbox and (not interfaces or key[1] in interfaces)]:
            _, attachment = self.made[key]
            home = self.home(attachment.network)
            if attachment.host_interface in ports(home):
                remove(home, attachment.host_interface)
            gone.append(self.made.pop(key)[1])
            self.save()
        return gone

    def look(self, attachment, path):
        """Whether an interface is as it was made."""
        if inode(path) != attachment.pod_netns_inode:
            raise Failure(kni.NAMESPACE_GONE, f"another namespace is at {path}: detach the pod")
        shown = [a for a in ip(path, read=["address", "show"]) if a["ifname"] == attachment.interface]
        if not shown or "UP" not in shown[0]["flags"]:
            raise Failure(kni.DAMAGED, f"{attachment.interface} is gone or down: detach and attach it again")
        there = {ipaddress.ip_address(a["local"]) for a in shown[0]["addr_info"]}
        for address in attachment.addresses:
            if ipaddress.ip_address(address.ip) not in there:
                raise Failure(kni.DAMAGED, f"{attachment.interface} has lost {address.ip}: detach and attach it again")

    # The service. Each call has the lock, and turns failures into statuses.

    def serve(self, context, work):
        try:
            with self.lock:
                return work()
        except Failure as failure:
            return failure.abort(context)

    def GetCapabilities(self, request, context):
        return kni.GetCapabilitiesResponse(name=NAME, version="0.1.0", protocol_version="v1alpha1", features=FEATURES)

    def SetupNetwork(self, request, context):
        return self.serve(context, lambda: self.setup(request.network)) or kni.SetupNetworkResponse()

    def RemoveNetwork(self, request, context):
        return self.serve(context, lambda: self.remove(request.name)) or kni.RemoveNetworkResponse()

    def Attach(self, request, context):
        def work():
            if not request.attachments:
                raise Failure(kni.INVALID, "attachments is empty: a runtime needs the Network and addresses")
            made = []
            try:
                for wanted in request.attachments:
                    made.append(self.attach(request.pod, wanted))
            except Exception:
                # All or nothing: what this call made goes again.
                self.detach(request.pod.sandbox_id, [a.interface for a, new in made if new] or ["-"])
                raise
            return kni.AttachResponse(attachments=[attachment for attachment, _ in made])

        return self.serve(context, work)

    def Detach(self, request, context):
        work = lambda: self.detach(request.pod.sandbox_id, list(request.interfaces)) and None
        return self.serve(context, work) or kni.DetachResponse()

    def Check(self, request, context):
        def work():
            sandbox, name = request.pod.sandbox_id, request.interface
            found = [made for key, made in self.made.items() if key[0] == sandbox and name in ("", key[1])]
            if not found:
                raise Failure(kni.ATTACHMENT_NOT_FOUND, f"sandbox {sandbox} has no {name or 'interface'}")
            for asked, attachment in found:
                self.look(attachment, request.pod.netns_path or asked.pod.netns_path)

        return self.serve(context, work) or kni.CheckResponse()

    def List(self, request, context):
        wanted = request.sandbox_id
        return self.serve(
            context,
            lambda: kni.ListResponse(attachments=[a for _, a in self.made.values() if wanted in ("", a.sandbox_id)]),
        )

    def CollectGarbage(self, request, context):
        def work():
            unused = {sandbox for sandbox, _ in self.made} - set(request.sandbox_ids)
            return kni.CollectGarbageResponse(removed=[a for sandbox in unused for a in self.detach(sandbox, [])])

        return self.serve(context, work)

    def Status(self, request, context):
        def work():
            count = lambda name: sum(a.network == name for _, a in self.made.values())
            networks = [kni.NetworkStatus(name=n, ready=True, attachments=count(n)) for n in self.networks]
            return kni.StatusResponse(ready=True, networks=networks)

        return self.serve(context, work)


def main():
    socket, folder = sys.argv[1:]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    kni_pb2_grpc.add_NetworkRuntimeServicer_to_server(Runtime(folder), server)
    # The agent uses no socket that others could reach: it is made for its owner alone.
    before = os.umask(0o177)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    os.umask(before)
    print(f"{NAME} serves on {socket}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: server.stop(grace=1))
    server.wait_for_termination()


if __name__ == "__main__":
    main()
