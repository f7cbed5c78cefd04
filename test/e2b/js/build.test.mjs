// Templates are built by the SDK: steps, files, tags, and what goes wrong.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import fs from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { after, test } from 'node:test'

const { Sandbox, Template } = await import(process.env.E2B_MODULE)

const context = fs.mkdtempSync(path.join(os.tmpdir(), 'build-'))
after(() => fs.rmSync(context, { recursive: true }))
fs.mkdirSync(path.join(context, 'folder'))
fs.writeFileSync(path.join(context, 'folder', 'hello.txt'), 'hello')

const unique = () => `built-${randomUUID()}`

test('files', async () => {
  const name = unique()
  const template = Template({ fileContextPath: context }).fromTemplate('base').copy('folder/*', 'copied')
  try {
    await Template.build(template, name)
  } catch (e) {
    // Where template host stands in for base there is no root to copy them.
    assert.match(e.message, /everything in this sandbox runs as user user/)
    return
  }
  const box = await Sandbox.create(name)
  try {
    assert.equal(await box.files.read('copied/hello.txt'), 'hello')
  } finally {
    await box.kill()
  }
})

test('steps and tags', async () => {
  const name = unique()
  const template = Template().fromTemplate('base').setEnvs({ COLOUR: 'blue' }).runCmd('echo $COLOUR > made.txt')
  const logs = []
  const built = await Template.build(template, `${name}:v1`, { onBuildLogs: (entry) => logs.push(entry.message) })
  assert.ok(built.templateId && built.buildId)
  assert.ok(logs.some((line) => line.includes('RUN echo $COLOUR')), logs.join('\n'))

  const box = await Sandbox.create(`${name}:v1`)
  try {
    assert.equal(await box.files.read('made.txt'), 'blue\n')
    assert.equal((await box.commands.run('echo $COLOUR')).stdout, 'blue\n')
  } finally {
    await box.kill()
  }

  assert.equal(await Template.exists(name), true)
  assert.equal(await Template.exists(unique()), false)
  await assert.rejects(Sandbox.create(name), /not found/)
  const assigned = await Template.assignTags(`${name}:v1`, ['stable', 'default'])
  assert.equal(assigned.buildId, built.buildId)
  await Template.removeTags(name, 'v1')
  const tags = await Template.getTags(built.templateId)
  assert.deepEqual(tags.map((t) => t.tag).sort(), ['default', 'stable'])
  await (await Sandbox.create(name)).kill()

  // The same again takes what is kept.
  const again = []
  await Template.build(template, `${name}:v2`, { onBuildLogs: (entry) => again.push(entry.message) })
  assert.ok(again.some((line) => line.includes('kept from an earlier build')), again.join('\n'))
})

test('what goes wrong says where', async () => {
  const template = Template().fromTemplate('base').runCmd('echo before').runCmd('echo why >&2; exit 3')
  await assert.rejects(Template.build(template, unique()), (e) => {
    assert.equal(e.name, 'BuildError')
    assert.match(e.message, /failed to run command 'echo why >&2; exit 3': command failed: exit code 3: why/)
    assert.match(e.stack, /build\.test\.mjs/)
    return true
  })
  await assert.rejects(Template.build(Template().fromImage('no-such-registry.invalid/x:1'), unique()), /no-such-registry/)
})

test('a start command runs in every sandbox', async () => {
  const name = unique()
  const template = Template().fromTemplate('base').setStartCmd('echo up > started; sleep 600', 'test -e started')
  const built = await Template.buildInBackground(template, name)
  for (let status = 'building'; status !== 'ready'; ) {
    status = (await Template.getBuildStatus(built)).status
    assert.notEqual(status, 'error')
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
  const box = await Sandbox.create(name)
  try {
    assert.equal(await box.files.read('started'), 'up\n')
  } finally {
    await box.kill()
  }
})
