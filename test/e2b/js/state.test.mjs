// Forks, snapshots and pauses without memory, with E2B's SDK for JavaScript as its users write them.
import assert from 'node:assert/strict'
import { after, describe, test } from 'node:test'

const { Sandbox, NotFoundError } = await import(process.env.E2B_MODULE)

const boxes = new Set()
async function create(template, opts = {}) {
  const box = await (template ? Sandbox.create(template, { timeoutMs: 600_000, ...opts }) : Sandbox.create({ timeoutMs: 600_000, ...opts }))
  boxes.add(box)
  return box
}
after(() => Promise.allSettled([...boxes].map((b) => b.kill())))

const bootID = async (box) => (await box.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout.trim()
const pause = (box, opts) => (box.pause ?? box.betaPause).call(box, opts)

describe('fork', () => {
  test('files, settings and identity', async () => {
    const box = await create('', { envs: { X: '1' }, metadata: { k: 'v' } })
    await box.files.write('state.txt', 'before')
    const forks = await box.fork({ count: 3, timeoutMs: 600_000 })
    forks.forEach((f) => boxes.add(f))
    assert.equal(new Set([box.sandboxId, ...forks.map((f) => f.sandboxId)]).size, 4)
    await forks[0].files.write('state.txt', 'changed')
    assert.deepEqual(await Promise.all([box, ...forks].map((f) => f.files.read('state.txt'))), ['before', 'changed', 'before', 'before'])
    const seen = await forks[1].commands.run('echo $X $E2B_SANDBOX_ID')
    assert.equal(seen.stdout, `1 ${forks[1].sandboxId}\n`)
    assert.deepEqual((await forks[2].getInfo()).metadata, { k: 'v' })
    assert.equal(await box.isRunning(), true)
    await box.kill()
    await assert.rejects(box.fork(), NotFoundError)
  })
})

describe('snapshots', () => {
  test('create from one, list, delete', async () => {
    const box = await create('', { envs: { X: '1' } })
    await box.commands.run('echo one > state; ln state hard; chmod 600 state')
    const snapshot = await box.createSnapshot()
    await box.files.write('state', 'two')
    await box.kill()
    const again = await create(snapshot.snapshotId)
    assert.equal((await again.commands.run('cat state; stat -c %a-%h hard; echo $X')).stdout, 'one\n600-2\n1\n')
    const listed = await Sandbox.listSnapshots({ sandboxId: box.sandboxId }).nextItems()
    assert.deepEqual(listed.map((s) => s.snapshotId), [snapshot.snapshotId])
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
    await assert.rejects(create(snapshot.snapshotId))
    assert.equal((await again.commands.run('cat state')).stdout, 'one\n')
  })

  test('a name moves to the newest', async () => {
    const box = await create()
    const name = 'web-' + Date.now()
    await box.files.write('state', 'one')
    const first = await box.createSnapshot({ name })
    await box.files.write('state', 'two')
    const second = await box.createSnapshot({ name })
    if (first.snapshotId === second.snapshotId) { // else this version of the SDK takes no names
      assert.equal(await (await create(name)).files.read('state'), 'two')
    }
    await Sandbox.deleteSnapshot(second.snapshotId)
  })
})

describe('pause without memory', () => {
  test('files and tokens stay, processes do not', async () => {
    const box = await create('', { envs: { X: '1' } })
    await box.files.write('state', 'kept')
    const before = await bootID(box)
    await box.commands.run('sleep 1000', { background: true, timeoutMs: 0 })
    await pause(box, { keepMemory: false })
    assert.equal(await box.isRunning(), false)
    assert.equal((await box.getInfo()).state, 'paused')
    const again = await box.connect()
    assert.equal(again.sandboxId, box.sandboxId)
    assert.equal(await box.isRunning(), true)
    assert.equal(await box.files.read('state'), 'kept')
    assert.notEqual(await bootID(box), before)
    assert.equal((await box.commands.list()).length, 0)
    assert.equal((await box.commands.run('echo $X')).stdout, '1\n')
  })
})
