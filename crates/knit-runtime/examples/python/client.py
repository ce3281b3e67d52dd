#!/usr/bin/env python3
"""A client of KNI in Python: who serves a socket, what is attached there, and whether a sandbox is as it was made.

    PYTHONPATH=venv venv/bin/python crates/knit-runtime/examples/python/client.py /run/knit/kni.sock SANDBOX

runtime.py says what it needs. It speaks to the agent's own socket and to that of any runtime.
"""

import sys

import grpc
from grpc_status import rpc_status
from kni.v1alpha1 import kni_pb2 as kni
from kni.v1alpha1 import kni_pb2_grpc


def reason(error):
    """What a failed call says of itself."""
    status = rpc_status.from_call(error)
    for any_ in status.details if status else []:
        detail = kni.ErrorDetail()
        if any_.Unpack(detail):
            return f"{kni.Reason.Name(detail.reason)}: {detail.message}"
    return f"{error.code().name}: {error.details()}"


def main():
    socket, sandbox = sys.argv[1:]
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        server = kni_pb2_grpc.NetworkRuntimeStub(channel)
        who = server.GetCapabilities(kni.GetCapabilitiesRequest(client_version="v1alpha1"))
        print(f"{who.name} speaks {who.protocol_version}")
        for attachment in server.List(kni.ListRequest(sandbox_id=sandbox)).attachments:
            addresses = ", ".join(address.ip for address in attachment.addresses)
            print(f"{attachment.interface} on {attachment.network}: {addresses}")
        try:
            server.Check(kni.CheckRequest(pod=kni.Pod(sandbox_id=sandbox)))
            print("as it was made")
        except grpc.RpcError as error:
            print(reason(error))


if __name__ == "__main__":
    main()
