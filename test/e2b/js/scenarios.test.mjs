// Scenarios with E2B's SDK for JavaScript as its users write them. The server is named by E2B_API_URL
// and E2B_SANDBOX_URL, and nothing else differs from a program that runs at E2B.
import assert from 'node:assert/strict'
import http from 'node:http'
import { after, before, describe, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'

const { Sandbox, CommandExitError, NotFoundError, TimeoutError, AuthenticationError, InvalidArgumentError } = await import(process.env.E2B_MODULE)

const boxes = new Set()
async function create(opts = {}) {
  const box = await Sandbox.create({ timeoutMs: 600_000, ...opts })
  boxes.add(box)
  return box
}
after(() => Promise.allSettled([...boxes].map((b) => b.kill())))

// ask makes a plain request to the server, with any Host.
function ask(path, { host, headers = {}, method = 'GET' } = {}) {
  const url = new URL(path, process.env.E2B_SANDBOX_URL)
  return new Promise((resolve, reject) => {
    const req = http.request(url, { method, headers: { ...headers, ...(host && { Host: host }) } }, (res) => {
      let body = ''
      res.on('data', (b) => (body += b))
      res.on('end', () => resolve({ status: res.statusCode, headers: res.headers, body }))
    })
    req.on('error', reject)
    req.end()
  })
}

// serve starts a server inside that answers with the request's head, and waits for it.
async function serve(box, port) {
  const program = `
import http.server
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = (self.requestline + "\\n" + str(self.headers)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("", ${port}), H).serve_forever()`
  await box.files.write('/tmp/serve.py', program)
  const cmd = await box.commands.run('python3 /tmp/serve.py', { background: true, timeoutMs: 0 })
  cmd.wait().catch(() => {})
  for (let i = 0; i < 1000; i++) {
    const probe = await box.commands.run(`python3 -c 'import socket; socket.create_connection(("127.0.0.1", ${port}))'`).catch(() => null)
    if (probe) return
    await sleep(50)
  }
  throw new Error('the server inside does not come up')
}

describe('control plane', () => {
  test('create, info, list, kill', async () => {
    const box = await create({ metadata: { run: 'x y&z', 'odd key!': 'ü' }, envs: { X: '1' } })
    assert.match(box.sandboxId, /^[a-z0-9]+$/)
    assert.equal(await box.isRunning(), true)
    const info = await box.getInfo()
    assert.deepEqual(info.metadata, { run: 'x y&z', 'odd key!': 'ü' })
    assert.equal(info.state, 'running')
    assert.equal(info.templateId, 'base')
    assert.equal(Math.round((info.endAt - info.startedAt) / 1000), 600)
    const found = await Sandbox.list({ query: { metadata: { run: 'x y&z' } } }).nextItems()
    assert.deepEqual(found.map((s) => s.sandboxId), [box.sandboxId])
    assert.equal(await box.kill(), true)
    assert.equal(await box.kill(), false)
    assert.equal(await box.isRunning(), false)
    await assert.rejects(Sandbox.connect(box.sandboxId), NotFoundError)
    await assert.rejects(Sandbox.getInfo(box.sandboxId), NotFoundError)
  })

  test('list in pages, by state', async () => {
    const run = `pages-${Date.now()}`
    const all = []
    for (let i = 0; i < 3; i++) all.unshift((await create({ metadata: { run } })).sandboxId)
    await Sandbox.pause?.(all[1]) ?? (await Sandbox.betaPause(all[1]))
    const pages = Sandbox.list({ limit: 2, query: { metadata: { run } } })
    const first = await pages.nextItems()
    assert.equal(pages.hasNext, true)
    const second = await pages.nextItems()
    assert.equal(pages.hasNext, false)
    assert.deepEqual([...first, ...second].map((s) => s.sandboxId), all)
    const paused = await Sandbox.list({ query: { metadata: { run }, state: ['paused'] } }).nextItems()
    assert.deepEqual(paused.map((s) => s.sandboxId), [all[1]])
  })

  test('connect never shortens a lifetime, setTimeout may', async () => {
    const box = await create({ timeoutMs: 300_000 })
    const end = async () => (await box.getInfo()).endAt.getTime()
    const before = await end()
    await Sandbox.connect(box.sandboxId, { timeoutMs: 10_000 })
    assert.equal(await end(), before)
    await Sandbox.connect(box.sandboxId, { timeoutMs: 600_000 })
    assert.ok((await end()) > before + 200_000)
    await box.setTimeout(20_000)
    assert.ok((await end()) < before)
  })

  test('the end of a lifetime', async () => {
    const box = await create({ timeoutMs: 2_000 })
    for (let i = 0; i < 1200 && (await box.isRunning()); i++) await sleep(100)
    assert.equal(await box.isRunning(), false)
  })

  test('a wrong key', async () => {
    await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }), AuthenticationError)
  })

  test('an unknown template', async () => {
    await assert.rejects(Sandbox.create('there-is-none'), /404: template 'there-is-none' not found/)
  })

  test('metrics', async () => {
    const box = await create()
    const [m] = await box.getMetrics()
    assert.equal(m.memTotal, 1 << 30)
    assert.ok(m.cpuCount >= 1 && m.memUsed > 0)
    const start = new Date(Date.now() - 3_600_000)
    assert.deepEqual(await box.getMetrics({ start, end: new Date(start.getTime() + 60_000) }), [])
  })

  test('20 creates at once', async () => {
    const all = await Promise.all(Array.from({ length: 20 }, () => create()))
    assert.equal(new Set(all.map((b) => b.sandboxId)).size, 20)
    const said = await Promise.all(all.map((b) => b.commands.run('echo $E2B_SANDBOX_ID')))
    assert.deepEqual(said.map((r) => r.stdout.trim()), all.map((b) => b.sandboxId))
    await Promise.all(all.map((b) => b.kill()))
  })
})

describe('pause and resume', () => {
  test('processes, files and tokens stay', async () => {
    const box = await create({ envs: { KEPT: 'yes' } })
    await box.files.write('note.txt', 'before')
    const cmd = await box.commands.run('sleep 600', { background: true, timeoutMs: 0 })
    cmd.wait().catch(() => {})
    const pause = () => (box.pause ?? box.betaPause).call(box)
    await pause()
    assert.equal(await box.isRunning(), false)
    assert.equal((await box.getInfo()).state, 'paused')
    assert.ok(!(await pause().catch(() => false)), 'a second pause is none')
    const again = await Sandbox.connect(box.sandboxId)
    assert.equal(await again.files.read('note.txt'), 'before')
    assert.equal((await box.commands.run('echo $KEPT')).stdout, 'yes\n')
    assert.ok((await again.commands.list()).some((p) => p.pid === cmd.pid))
    assert.equal(await again.commands.kill(cmd.pid), true)
  })

  test('a command that a kill cuts', async () => {
    const box = await create()
    const cmd = await box.commands.run('sleep 60', { background: true })
    await box.kill()
    await assert.rejects(cmd.wait(), (err) => err instanceof TimeoutError && /killed or reached its end of life/.test(err.message))
  })
})

describe('commands', () => {
  let box
  before(async () => (box = await create()))

  test('output and exit codes', async () => {
    const r = await box.commands.run('echo out; echo err >&2')
    assert.deepEqual([r.exitCode, r.stdout, r.stderr], [0, 'out\n', 'err\n'])
    await assert.rejects(box.commands.run('echo no; exit 3'), (e) => e instanceof CommandExitError && e.exitCode === 3 && e.stdout === 'no\n')
  })

  test('output as it comes, environment, directory', async () => {
    let got = ''
    const onStdout = (s) => {
      got += s
      if (got === 'b\n/tmp\n') box.files.write('/tmp/go-on', '') // what comes later comes once this was heard
    }
    await box.commands.run('echo $A; pwd; until test -e /tmp/go-on; do sleep 0.05; done; echo later', { envs: { A: 'b' }, cwd: '/tmp', onStdout })
    assert.equal(got, 'b\n/tmp\nlater\n')
  })

  test('a timeout takes the whole tree', async () => {
    await assert.rejects(box.commands.run('setsid sleep 4711 & sleep 4712', { timeoutMs: 500 }), TimeoutError)
    // The SDK's own clock may end the call a moment before the server's ends the processes.
    const left = () => box.commands.run('grep -lz 471[12] /proc/[0-9]*/cmdline || true')
    for (let i = 0; i < 1200 && (await left()).stdout; i++) await sleep(50)
    assert.equal((await left()).stdout, '')
  })

  test('standard input', async () => {
    const cmd = await box.commands.run('cat', { background: true, stdin: true })
    await box.commands.sendStdin(cmd.pid, 'fed')
    await box.commands.closeStdin?.(cmd.pid)
    if (!box.commands.closeStdin) return void (await cmd.kill())
    assert.equal((await cmd.wait()).stdout, 'fed')
  })

  test('a killed process', async () => {
    const cmd = await box.commands.run('sleep 100', { background: true })
    assert.equal(await cmd.kill(), true)
    await assert.rejects(cmd.wait(), (e) => e instanceof CommandExitError && /killed/.test(e.error))
    assert.equal(await box.commands.kill(999_999), false)
  })

  test('a late connection gets what it missed', async () => {
    const cmd = await box.commands.run('for i in 1 2 3 4 5; do echo $i; sleep 0.1; done', { background: true })
    await cmd.disconnect()
    await sleep(300)
    const late = await box.commands.connect(cmd.pid)
    assert.equal((await late.wait()).stdout, '1\n2\n3\n4\n5\n')
  })

  test('100 at once', async () => {
    const all = await Promise.all(Array.from({ length: 100 }, (_, i) => box.commands.run(`echo ${i}`)))
    assert.deepEqual(all.map((r) => r.stdout), Array.from({ length: 100 }, (_, i) => `${i}\n`))
  })

  test('a terminal', async () => {
    let out = ''
    const pty = await box.pty.create({ cols: 80, rows: 24, onData: (b) => (out += Buffer.from(b).toString()) })
    await box.pty.resize(pty.pid, { cols: 100, rows: 30 })
    await box.pty.sendInput(pty.pid, Buffer.from('stty size; exit\n'))
    await pty.wait()
    assert.match(out, /30 100/)
  })
})

describe('files', () => {
  let box
  before(async () => (box = await create()))

  test('write, read, list, move, remove', async () => {
    const written = await box.files.write('dir/a.txt', 'héllo')
    assert.equal(written.path, '/home/user/dir/a.txt')
    assert.equal(await box.files.read('dir/a.txt'), 'héllo')
    assert.deepEqual((await box.files.list('dir')).map((e) => [e.name, e.type, e.size]), [['a.txt', 'file', 6]])
    await box.files.rename('dir/a.txt', 'dir/b.txt')
    assert.equal(await box.files.exists('dir/a.txt'), false)
    assert.equal((await box.files.getInfo('dir/b.txt')).name, 'b.txt')
    assert.equal(await box.files.makeDir('dir'), false)
    await box.files.remove('dir')
    await assert.rejects(box.files.read('dir/b.txt'), NotFoundError)
    await assert.rejects(box.files.list('dir'), NotFoundError)
  })

  test('bytes, many at once, and /proc', async () => {
    const bytes = Uint8Array.from({ length: 300_000 }, (_, i) => i * 7)
    await box.files.write('bytes', bytes.buffer)
    assert.deepEqual(await box.files.read('bytes', { format: 'bytes' }), bytes)
    const many = await box.files.write([{ path: 'm/1', data: 'one' }, { path: 'm/2', data: 'two' }])
    assert.deepEqual(many.map((f) => f.path), ['/home/user/m/1', '/home/user/m/2'])
    assert.match(await box.files.read('/proc/version'), /Linux/)
  })

  test('watch', async () => {
    const seen = []
    const watch = await box.files.watchDir('.', (e) => seen.push(`${e.type}:${e.name}`))
    await box.files.write('w1', 'x')
    await box.files.remove('w1')
    for (let i = 0; i < 1200 && !seen.includes('remove:w1'); i++) await sleep(50)
    await watch.stop()
    assert.ok(seen.includes('create:w1') && seen.includes('remove:w1'), seen.join(' '))
  })

  test('signed links', async () => {
    await box.files.write('link.txt', 'by link')
    const down = await box.downloadUrl('link.txt', { useSignatureExpiration: 60 })
    assert.equal(await (await fetch(down)).text(), 'by link')
    const late = await fetch(await box.downloadUrl('link.txt', { useSignatureExpiration: -60 }))
    assert.deepEqual([late.status, await late.json()], [401, { code: 401, message: 'signature is already expired' }])
    const form = new FormData()
    form.append('file', 'uploaded')
    const up = await fetch(await box.uploadUrl('up.txt'), { method: 'POST', body: form })
    assert.deepEqual(await up.json(), [{ name: 'up.txt', path: '/home/user/up.txt', type: 'file' }])
    assert.equal(await box.files.read('up.txt'), 'uploaded')
  })

  test('a path that is none', async () => {
    await assert.rejects(box.files.list('.', { depth: 0 }), InvalidArgumentError)
    await assert.rejects(box.files.read('/etc'), InvalidArgumentError)
  })
})

describe('ports', () => {
  test('by host name, without our credentials, masked', async () => {
    const box = await create({ network: { maskRequestHost: 'mask.test:${PORT}' } })
    await serve(box, 8080)
    const host = box.getHost(8080)
    assert.match(host, new RegExp(`^8080-${box.sandboxId}\\.casemate\\.localhost:[0-9]+$`))
    const r = await ask('/x?y=1', { host, headers: { 'X-API-Key': process.env.E2B_API_KEY, 'X-Access-Token': 'secret-token' } })
    assert.equal(r.status, 200)
    assert.match(r.body, /^GET \/x\?y=1 HTTP\/1\.1\n/)
    assert.match(r.body, /Host: mask\.test:8080/)
    assert.doesNotMatch(r.body, /e2b_|secret-token/)
    const closed = await ask('/', { host: box.getHost(9) })
    assert.deepEqual([closed.status, JSON.parse(closed.body)], [502, { sandboxId: box.sandboxId, message: 'The sandbox is running but port is not open', port: 9, code: 502 }])
    await box.kill()
    const gone = await ask('/', { host })
    assert.deepEqual([gone.status, JSON.parse(gone.body).message], [502, 'The sandbox was not found'])
  })

  test('with a traffic token', async () => {
    const box = await create({ network: { allowPublicTraffic: false } })
    await serve(box, 8080)
    const host = box.getHost(8080)
    assert.equal((await ask('/', { host })).status, 403)
    assert.equal((await ask('/', { host, headers: { 'e2b-traffic-access-token': 'x' } })).status, 403)
    assert.equal((await ask('/', { host, headers: { 'e2b-traffic-access-token': box.trafficAccessToken } })).status, 200)
  })

  test('a call wakes a sandbox that asked for it', async () => {
    const box = await create({ timeoutMs: 3_000, lifecycle: { onTimeout: 'pause', autoResume: true } })
    await serve(box, 8080)
    for (let i = 0; i < 1200 && (await box.getInfo()).state !== 'paused'; i++) await sleep(100)
    assert.equal((await box.getInfo()).state, 'paused')
    assert.equal((await ask('/', { host: box.getHost(8080) })).status, 200)
    assert.equal((await box.getInfo()).state, 'running')
  })
})
