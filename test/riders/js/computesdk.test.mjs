// ComputeSDK's E2B provider: one task over its whole surface.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { e2b } from '@computesdk/e2b'
import { compute } from 'computesdk'

test('ComputeSDK: create, commands, files, background, ports, find again, snapshot, destroy', async () => {
  const provider = e2b({ apiKey: process.env.E2B_API_KEY })
  compute.setConfig({ provider })
  const box = await compute.sandbox.create({ timeout: 600_000, envs: { GREETING: 'hello' }, metadata: { task: 'riders' } })
  let alive = true
  try {
    const hello = await box.runCommand('echo "$GREETING from $(id -un)"; echo oops >&2; exit 3')
    assert.equal(hello.stdout, 'hello from user\n')
    assert.equal(hello.stderr, 'oops\n')
    assert.equal(hello.exitCode, 3)

    const where = await box.runCommand(`sh -c 'pwd; echo "$COLOUR"'`, { cwd: '/tmp', env: { COLOUR: 'green' } })
    assert.equal(where.stdout, '/tmp\ngreen\n')

    const started = Date.now()
    const late = await box.runCommand('sleep 60', { timeout: 500 })
    assert.notEqual(late.exitCode, 0)
    assert.ok(Date.now() - started < 20_000, 'a timeout ends the command')

    const fs = box.filesystem
    await fs.mkdir('/tmp/task')
    await fs.writeFile('/tmp/task/ä b.txt', 'grüße\n')
    assert.equal(await fs.readFile('/tmp/task/ä b.txt'), 'grüße\n')
    assert.deepEqual((await fs.readdir('/tmp/task')).map((e) => e.name), ['ä b.txt'])
    assert.equal(await fs.exists('/tmp/task/ä b.txt'), true)
    await fs.remove('/tmp/task/ä b.txt')
    assert.equal(await fs.exists('/tmp/task/ä b.txt'), false)

    const background = await box.runCommand('python3 -m http.server 8000 --bind 127.0.0.1', { background: true })
    assert.equal(background.exitCode, 0)
    const fetched = await box.runCommand('for i in $(seq 100); do curl -sf http://127.0.0.1:8000/ && break; sleep 0.1; done')
    assert.match(fetched.stdout, /Directory listing/)
    assert.match(await box.getUrl({ port: 8000 }), /^https:\/\/8000-[a-z0-9]+\./)

    const again = await compute.sandbox.getById(box.sandboxId)
    assert.equal((await again.runCommand('cat /proc/sys/kernel/hostname >/dev/null && echo same')).stdout, 'same\n')
    assert.equal((await again.getInfo()).status, 'running')

    await fs.writeFile('/home/user/kept.txt', 'kept')
    const snapshot = await provider.snapshot.create(box.sandboxId, { name: `riders-${Date.now()}` })
    const restored = await compute.sandbox.create({ snapshotId: snapshot.id, timeout: 600_000 })
    assert.equal(await restored.filesystem.readFile('/home/user/kept.txt'), 'kept')
    await restored.destroy()

    await box.destroy()
    alive = false
    assert.equal(await compute.sandbox.getById(box.sandboxId), null)
  } finally {
    if (alive) await box.destroy()
  }
})
