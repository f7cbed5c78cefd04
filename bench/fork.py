# The peer of a fresh run: an interpreter that is warm forks for each run of the same code, reads what
# it shows, and waits for the child's end. N and CODE are set by who runs this.
import ast, gc, json, os, time


def show(code):
    tree = ast.parse(code, "<cell>")
    last = ast.Expression(tree.body.pop().value)
    space = {}
    exec(compile(tree, "<cell>", "exec"), space)
    return repr(eval(compile(last, "<cell>", "eval"), space))


def once():
    begun = time.perf_counter()
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(into, show(CODE).encode())
        os._exit(0)
    os.close(into)
    text = os.read(out, 1 << 16)
    os.close(out)
    _, status = os.waitpid(pid, 0)
    if status or text != b"2":
        raise RuntimeError(f"the child ended as {status} and showed {text}")
    return (time.perf_counter() - begun) * 1e6


gc.collect()
gc.freeze()
for _ in range(10):
    once()
print(json.dumps([round(once(), 1) for _ in range(N)]))
