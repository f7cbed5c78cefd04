"""Times 1+1 in an ipykernel that jupyter_client drives; prints the microseconds of each call as JSON."""
import json
import sys
import time

from jupyter_client.manager import start_new_kernel

rounds = int(sys.argv[1])
manager, client = start_new_kernel(kernel_name="python3")


def call():
    begun = time.perf_counter()
    asked = client.execute("1+1")
    value = None
    while True:  # the result and the idle status come on one channel, the reply on another
        message = client.get_iopub_msg(timeout=10)
        if message["parent_header"].get("msg_id") != asked:
            continue
        if message["msg_type"] == "execute_result":
            value = message["content"]["data"]["text/plain"]
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            break
    client.get_shell_msg(timeout=10)
    assert value == "2", value
    return (time.perf_counter() - begun) * 1e6


try:
    for _ in range(20):
        call()
    print(json.dumps([call() for _ in range(rounds)]))
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
