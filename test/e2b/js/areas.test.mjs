// Scenarios with E2B's SDK for JavaScript for the areas that scenarios.test.mjs leaves out: git, metadata and encodings of
// files, the network's rules, templates, and what must say that it is not there.
import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'

const { Sandbox, Secret, Template, Volume, CommandExitError, FileType } = await import(process.env.E2B_MODULE)

const boxes = new Set()
async function create(template, opts = {}) {
  const box = await Sandbox.create(template, { timeoutMs: 600_000, ...opts })
  boxes.add(box)
  return box
}
after(() => Promise.allSettled([...boxes].map((b) => b.kill())))

describe('git', () => {
  test('init, commit, branches, status, clone', async () => {
    const box = await create('base')
    await box.git.init('repo', { initialBranch: 'main' })
    await box.git.configureUser('A', 'a@example.com')
    await box.files.write('repo/one', '1\n')
    assert.equal((await box.git.status('repo')).fileStatus.length, 1)
    await box.git.add('repo')
    await box.git.commit('repo', 'first', { authorName: 'A', authorEmail: 'a@example.com' })
    await box.git.createBranch('repo', 'side')
    const { branches, currentBranch } = await box.git.branches('repo')
    assert.deepEqual([branches.toSorted(), currentBranch], [['main', 'side'], 'side'])
    assert.equal((await box.git.status('repo')).isClean, true)
    await box.git.clone('file:///home/user/repo', { path: 'copy' })
    assert.equal(await box.files.read('copy/one'), '1\n')
  })
})

describe('files', () => {
  let box
  before(async () => (box = await create('base')))

  test('metadata', async () => {
    const written = await box.files.write('m', 'x', { metadata: { color: 'blue', 'two-words': 'a b' } })
    assert.deepEqual(written.metadata, { color: 'blue', 'two-words': 'a b' })
    assert.deepEqual((await box.files.getInfo('m')).metadata, { color: 'blue', 'two-words': 'a b' })
    assert.deepEqual((await box.files.list('.')).find((e) => e.name === 'm').metadata, { color: 'blue', 'two-words': 'a b' })
    await box.files.rename('m', 'm2')
    assert.equal((await box.files.getInfo('m2')).metadata.color, 'blue')
    await box.files.write('m2', 'y')
    assert.ok(!(await box.files.getInfo('m2')).metadata?.color, 'a write replaces the whole set')
  })

  test('gzip both ways, blobs and streams', async () => {
    const text = 'compress me '.repeat(10_000)
    await box.files.write('z', text, { gzip: true })
    assert.equal(await box.files.read('z', { gzip: true }), text)
    assert.equal(await (await box.files.read('z', { format: 'blob' })).text(), text)
    await box.files.write('s', new Blob([text]).stream(), { useOctetStream: true })
    let got = ''
    for await (const part of await box.files.read('s', { format: 'stream' })) got += Buffer.from(part).toString()
    assert.equal(got, text)
  })

  test('links, owners, depth', async () => {
    await box.commands.run('mkdir -p d/e && echo x > d/e/f && ln -s d/e/f link')
    const link = await box.files.getInfo('link')
    assert.deepEqual([link.path, link.symlinkTarget, link.type], ['/home/user/link', '/home/user/d/e/f', FileType.FILE])
    const deep = await box.files.list('d', { depth: 2 })
    assert.deepEqual(deep.map((e) => e.path), ['/home/user/d/e', '/home/user/d/e/f'])
    const [e] = deep
    assert.deepEqual([e.owner, e.permissions, e.type], ['user', 'drwxr-xr-x', FileType.DIR])
  })
})

describe('network', () => {
  const reach = (box, to) => box.commands.run(`curl -sSk -o /dev/null --connect-timeout 60 https://${to}`)
  const refused = async (box, to) => {
    // 7 is a refusal; whoever waited for a time limit would get 28 (curl(1)).
    await assert.rejects(reach(box, to), (e) => e instanceof CommandExitError && e.exitCode === 7)
  }

  test('closed, and what is named is let through', async () => {
    const box = await create('base', { allowInternetAccess: false })
    await refused(box, '1.1.1.1')
    const some = await create('base', { network: { allowOut: ['1.1.1.1', 'example.com'], denyOut: ['0.0.0.0/0'] } })
    await refused(some, '8.8.8.8')
    assert.deepEqual((await some.getInfo()).network.allowOut, ['1.1.1.1', 'example.com'])
  })

  test('never private addresses', async () => {
    const box = await create('base')
    for (const to of ['10.0.0.1', '192.168.0.1', '169.254.169.254']) await refused(box, to)
    await assert.rejects(create('base', { network: { allowOut: ['10.0.0.1'] } }), /only an administrator/)
  })

  test('rules change while it runs', async () => {
    const box = await create('base')
    if (!box.updateNetwork) return
    await box.updateNetwork({ denyOut: ['0.0.0.0/0'] })
    await refused(box, '1.1.1.1')
    assert.deepEqual((await box.getInfo()).network.denyOut, ['0.0.0.0/0'])
  })

  test('what is no proxy says so', async () => {
    const egressProxy = { address: 'proxy.example.com:0' }
    await assert.rejects(create('base', { network: { egressProxy } }), /400: network.egressProxy/)
    const box = await create('base')
    await assert.rejects(box.updateNetwork({ egressProxy }), /400: network.egressProxy/)
  })

  test('what is not there yet says so', async () => {
    await assert.rejects(Volume.create('none'), /501: .*does not support it yet/)
  })
})

describe('secrets', { skip: !Secret }, () => {
  const name = `key-${Date.now()}`
  after(() => Secret?.destroy(name))

  test('made, changed, listed, destroyed, and shown by nothing', async () => {
    const value = 'canary-' + 'pL8'.repeat(9)
    const made = await Secret.create(name.toUpperCase(), value, { metadata: { team: 'a' } })
    assert.deepEqual([made.name, made.version, made.metadata], [name, 1, { team: 'a' }])
    await assert.rejects(Secret.create(name, value), /409.*already/)
    assert.equal((await Secret.update(name, value + 'x')).version, 2)
    assert.equal((await Secret.getInfo(made.secretId)).version, 2)
    assert.equal(await Secret.exists('there-is-none'), false)
    await assert.rejects(Secret.update('there-is-none', value), /not found/)
    const all = []
    for (const pages = Secret.list({ limit: 1 }); pages.hasNext; ) all.push(...(await pages.nextItems()))
    assert.ok(all.some((s) => s.secretId === made.secretId))
    assert.ok(!JSON.stringify(all).includes('canary'))
    const box = await create('base', {
      network: { rules: { 'api.example.com': [{ transform: { headers: { Authorization: `Bearer ${Secret.fill(name)}` } } }] } },
    })
    const { network } = await box.getInfo()
    assert.deepEqual(network.rules['api.example.com'], [{ transform: { headers: { Authorization: `Bearer \${e2b.secrets.${name}}` } } }])
    await box.updateNetwork({ rules: { 'api.example.com': [{ transform: { headers: { 'X-Key': Secret.fill(name) } } }] } })
    assert.equal(await Secret.destroy(name), true)
    assert.equal(await Secret.destroy(name), false)
  })
})

describe('templates', () => {
  test('those that the SDKs ask for exist', async () => {
    for (const name of ['base', 'code-interpreter-v1']) {
      assert.equal(await Template.exists(name), true)
      const box = await create(name)
      assert.equal((await box.commands.run('id -un')).stdout, 'user\n')
      assert.equal((await box.getInfo()).templateId, name)
    }
    assert.equal(await Template.exists('there-is-none'), false)
  })
})
