// Pause, resume, fork and snapshots with E2B's SDK for JavaScript on a server whose sandboxes run on gVisor: programs go on
// with what they hold in memory. Each counter shows a number of its own making, which is nowhere but in its memory.
import assert from 'node:assert/strict'
import http from 'node:http'
import { after, describe, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'

const { Sandbox } = await import(process.env.E2B_MODULE)

const boxes = new Set()
async function create(template, opts = {}) {
  const box = await (template ? Sandbox.create(template, { timeoutMs: 300_000, ...opts }) : Sandbox.create({ timeoutMs: 300_000, ...opts }))
  boxes.add(box)
  return box
}
after(() => Promise.allSettled([...boxes].map((b) => b.kill())))

const counter = `
import os, random, time
me, n = random.getrandbits(64), 0
while True:
    n += 1
    with open("/tmp/count.new", "w") as f:
        f.write("%d %d" % (me, n))
    os.rename("/tmp/count.new", "/tmp/count")
    print(n, flush=True)
    time.sleep(0.02)`

// until waits for something to be true, for as long as the slowest machine may take.
async function until(what, holds) {
  for (let i = 0; i < 1200; i++) {
    if (await holds()) return
    await sleep(100)
  }
  assert.fail(`${what} did not come`)
}

const count = async (box) => {
  const [me, n] = (await box.files.read('/tmp/count')).split(' ')
  return { me, n: Number(n) }
}

async function counting(opts) {
  const box = await create('', opts)
  await box.files.write('/tmp/counter.py', counter)
  const cmd = await box.commands.run('exec python3 /tmp/counter.py', { background: true, timeoutMs: 0 })
  cmd.wait().catch(() => {}) // what ends it is the end of its sandbox
  await until('the first count', async () => (await box.files.exists('/tmp/count')) && (await count(box)).n > 5)
  return { box, pid: cmd.pid, was: await count(box) }
}

// goesOn fails unless the counter that a sandbox runs is the one that it was, and counts on from where it was.
async function goesOn(box, was) {
  const first = await count(box)
  assert.equal(first.me, was.me, 'this is another counter')
  assert.ok(first.n >= was.n, `it counts ${first.n}, and was at ${was.n}`)
  await until('the next count', async () => (await count(box)).n > first.n)
  return count(box)
}

describe('memory', () => {
  test('a pause and a resume', async () => {
    const { box, pid, was } = await counting({ envs: { KEPT: 'yes' } })
    await box.pause()
    assert.equal((await box.getInfo()).state, 'paused')
    const again = await Sandbox.connect(box.sandboxId)
    const now = await goesOn(again, was)
    assert.ok((await again.commands.list()).some((p) => p.pid === pid), 'the command has another pid')
    let seen = ''
    const cmd = await again.commands.connect(pid, { onStdout: (s) => (seen += s) })
    cmd.wait().catch(() => {})
    await until('the output of later', async () => seen.split('\n').includes(String(now.n + 1)))
    await box.pause() // and once more
    await box.connect()
    await goesOn(box, now)
    assert.equal((await box.commands.run('echo $KEPT')).stdout, 'yes\n')
    assert.equal(await box.commands.kill(pid), true)
    const left = () => box.commands.run("pgrep -f 'counter[.]py' || true")
    await until('its end', async () => (await left()).stdout === '')
  })

  test('a fork into three', async () => {
    const { box, pid, was } = await counting()
    const forks = await box.fork({ count: 3, timeoutMs: 300_000 })
    forks.forEach((f) => boxes.add(f))
    for (const b of [...forks, box]) await goesOn(b, was)
    for (const f of forks) assert.equal((await f.commands.run('echo $E2B_SANDBOX_ID')).stdout.trim(), f.sandboxId)
    assert.equal(await forks[0].commands.kill(pid), true)
    const stopped = await count(forks[0])
    for (const b of [forks[1], forks[2], box]) await goesOn(b, was)
    assert.deepEqual(await count(forks[0]), stopped)
  })

  test('a snapshot, and two that start from it', async () => {
    const { box, was } = await counting()
    const snapshot = await box.createSnapshot()
    const taken = await goesOn(box, was)
    await box.kill()
    for (let i = 0; i < 2; i++) {
      const b = await create(snapshot.snapshotId)
      await goesOn(b, was)
      assert.equal((await count(b)).me, taken.me)
      await b.kill()
    }
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  })

  test('a pause at the end of a lifetime, and a request that wakes it', async () => {
    const box = await create('', { lifecycle: { onTimeout: 'pause', autoResume: true } })
    await box.files.write('/tmp/serve.py', `
import http.server
class H(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        H.asked += 1
        body = b"%d" % H.asked
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("", 8080), H).serve_forever()`)
    const cmd = await box.commands.run('exec python3 /tmp/serve.py', { background: true, timeoutMs: 0 })
    cmd.wait().catch(() => {})
    await until('the server inside', async () => (await ask(box)) === '1')
    assert.equal(await ask(box), '2')
    await box.setTimeout(1_000)
    await until('the pause', async () => (await box.getInfo()).state === 'paused')
    assert.equal(await ask(box), '3')
    assert.equal((await box.getInfo()).state, 'running')
  })

  test('a pause that keeps no memory', async () => {
    const { box } = await counting()
    await box.pause({ keepMemory: false })
    await box.connect()
    assert.equal((await box.commands.run("pgrep -f 'counter[.]py' || true")).stdout, '')
    assert.equal(await box.files.exists('/tmp/counter.py'), true)
  })
})

// ask makes a request to port 8080, and returns the body of an answer that is good.
function ask(box) {
  return new Promise((resolve, reject) => {
    const req = http.request(process.env.E2B_SANDBOX_URL, { headers: { Host: box.getHost(8080) } }, (res) => {
      let body = ''
      res.on('data', (b) => (body += b))
      res.on('end', () => resolve(res.statusCode === 200 ? body : ''))
    })
    req.on('error', reject)
    req.end()
  })
}
