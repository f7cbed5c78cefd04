// Host names over TLS with E2B's SDK for JavaScript: what getHost returns is used as it is, with HTTPS and the
// certificate of the server's own authority. Nothing is changed but that the authority is trusted.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
import { after, before, describe, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'

const { Sandbox, TimeoutError } = await import(process.env.E2B_MODULE)
const { WebSocket } = createRequire(process.env.E2B_MODULE)('undici')

// app answers with what it was sent: every byte of a request's head, as the head of a WebSocket's handshake, and
// as server-sent events.
const app = `
import base64, hashlib, http.server, struct, time
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def head(self):
        return (self.requestline + "\\n" + str(self.headers)).encode()
    def do_GET(self):
        if self.path.startswith("/ws"):
            return self.socket()
        self.send_response(200)
        if self.path.startswith("/events"):
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for i in range(3):
                self.chunk(b"data: %d\\n\\n" % i)
                time.sleep(1)
            return self.chunk(b"")
        self.send_header("Content-Length", str(len(self.head())))
        self.send_header("Set-Cookie", "app=1; Path=/; Domain=" + self.headers["Host"].split(":")[0].split(".", 1)[1])
        self.end_headers()
        self.wfile.write(self.head())
    def chunk(self, b):
        self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(b), b))
        self.wfile.flush()
    def socket(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.frame(self.head())
        while True:
            b = self.rfile.read(2)
            if len(b) < 2 or b[0] & 15 == 8:
                return
            n = b[1] & 127
            if n == 126:
                n = struct.unpack(">H", self.rfile.read(2))[0]
            mask, data = self.rfile.read(4), self.rfile.read(n)
            self.frame(bytes(c ^ mask[i % 4] for i, c in enumerate(data)))
    def frame(self, b):
        self.wfile.write(b"\\x81" + (bytes([len(b)]) if len(b) < 126 else b"\\x7e" + struct.pack(">H", len(b))) + b)
        self.wfile.flush()
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("", 8080), H).serve_forever()`

// secrets are all that opens anything here, in every place where a client could carry them.
const secrets = (box) => ({
  'X-API-Key': process.env.E2B_API_KEY,
  'X-Access-Token': box.envdAccessToken ?? 'an-access-token',
  'E2b-Traffic-Access-Token': box.trafficAccessToken,
  Authorization: `Bearer ${process.env.E2B_API_KEY}`,
  'E2b-Sandbox-Id': box.sandboxId,
  'Casemate-Anything': 'of-ours',
})

describe('host names over TLS', () => {
  let box, url
  before(async () => {
    box = await Sandbox.create({ network: { allowPublicTraffic: false } })
    await box.files.write('/tmp/app.py', app)
    const cmd = await box.commands.run('python3 /tmp/app.py', { background: true, timeoutMs: 0 })
    cmd.wait().catch(() => {})
    url = `https://${box.getHost(8080)}`
    for (let i = 0; i < 1000; i++) {
      if ((await fetch(url, { headers: secrets(box) })).status === 200) return
      await sleep(50)
    }
    throw new Error('the server inside does not come up')
  })
  after(() => box?.kill())

  const shown = (head) => {
    for (const value of Object.values(secrets(box))) {
      const bare = value.replace('Bearer ', '')
      if (bare !== box.sandboxId) assert.ok(!head.includes(bare), `the application sees ${bare}:\n${head}`)
    }
  }

  test('HTTP, without our credentials', async () => {
    const r = await fetch(`${url}/x?y=1`, { headers: { ...secrets(box), Cookie: 'mine=1', 'X-Mine': '2' } })
    const head = await r.text()
    shown(head)
    assert.match(head, /^GET \/x\?y=1 HTTP\/1\.1\n/)
    assert.match(head, new RegExp(`Host: ${box.getHost(8080)}`))
    assert.match(head, /X-Forwarded-Proto: https/i)
    assert.match(head, /cookie: mine=1/i)
    // A cookie for all sandboxes would be: it stays with the one that set it.
    assert.equal(r.headers.get('set-cookie'), 'app=1; Path=/')
    assert.equal((await fetch(url)).status, 403)
    const own = await fetch(url, { headers: { ...secrets(box), Authorization: 'Bearer of-the-app' } })
    assert.match(await own.text(), /authorization: Bearer of-the-app/i)
  })

  test('WebSocket', async () => {
    const ws = new WebSocket(url.replace('https', 'wss') + '/ws', { headers: secrets(box) })
    const messages = []
    const done = new Promise((resolve, reject) => {
      ws.onmessage = (m) => {
        messages.push(m.data)
        if (messages.length === 1) ws.send('é'.repeat(200))
        else resolve(ws.close())
      }
      ws.onerror = (e) => reject(e.error ?? new Error('the WebSocket broke'))
    })
    await done
    shown(messages[0])
    assert.equal(messages[1], 'é'.repeat(200))
  })

  test('server-sent events, as they come', async () => {
    const r = await fetch(`${url}/events`, { headers: secrets(box) })
    let parts = 0
    let text = ''
    for await (const part of r.body) {
      parts++
      text += Buffer.from(part).toString()
    }
    assert.equal(text, 'data: 0\n\ndata: 1\n\ndata: 2\n\n')
    assert.ok(parts >= 2, 'they came in one piece') // a second lies between them
  })

  test('closed and unknown ports', async () => {
    const closed = await fetch(`https://${box.getHost(9)}`, { headers: secrets(box) })
    assert.deepEqual([closed.status, (await closed.json()).port], [502, 9])
    const gone = await fetch(url.replace(box.sandboxId, 'i0123456789abcdefghij'))
    assert.deepEqual([gone.status, (await gone.json()).message], [502, 'The sandbox was not found'])
    const page = await fetch(`https://${box.getHost(9)}`, { headers: { ...secrets(box), Accept: 'text/html' } })
    assert.match(page.headers.get('content-type'), /^text\/html/)
  })
})

describe('nothing but a domain', () => {
  // Of E2B_DOMAIN the SDK makes the URL of the control plane, and each sandbox's own, which it calls over HTTP/2.
  test('commands and files by name', async (t) => {
    const { E2B_API_URL, E2B_SANDBOX_URL } = process.env
    t.after(() => Object.assign(process.env, { E2B_API_URL, E2B_SANDBOX_URL }))
    delete process.env.E2B_SANDBOX_URL
    delete process.env.E2B_API_URL
    process.env.E2B_DOMAIN = E2B_API_URL.replace('http://127.0.0.1', 'casemate.localhost')
    t.after(() => delete process.env.E2B_DOMAIN)
    const box = await Sandbox.create()
    t.after(() => box.kill())
    assert.equal((await box.commands.run('echo $0')).stdout, '/bin/bash\n')
    await box.files.write('note', 'by name')
    assert.equal(await (await fetch(await box.downloadUrl('note'))).text(), 'by name')
    const all = await Promise.all(Array.from({ length: 150 }, (_, i) => box.commands.run(`sleep 0.2; echo ${i}`)))
    assert.deepEqual(all.map((r) => r.stdout), Array.from({ length: 150 }, (_, i) => `${i}\n`))
    const cmd = await box.commands.run('sleep 60', { background: true })
    await box.kill()
    await assert.rejects(cmd.wait(), (e) => e instanceof TimeoutError && /killed or reached its end of life/.test(e.message))
  })
})
