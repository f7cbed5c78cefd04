// What E2B's SDK for JavaScript says of networks and secrets, against a server in a fake internet. The test that runs it
// looks at what arrives at the sites.
import assert from 'node:assert/strict'

const { Sandbox, Secret } = await import(process.env.E2B_MODULE)
const [site, other] = [process.env.SITE, process.env.OTHER]
const opts = { timeoutMs: 120_000 }
const say = (step) => console.log(step)
const get = (box, url, flags = '') => box.commands.run(`curl -sSf -m 30 ${flags} '${url}'`)
const refused = (box, url) => assert.rejects(get(box, url), (e) => e.exitCode > 0 && e.exitCode !== 28)

await Secret.create('js-key', process.env.VALUE)
const rules = { [site]: [{ transform: { headers: { Authorization: `Bearer ${Secret.fill('js-key')}`, 'X-Team': 'blue team' } } }] }

let box = await Sandbox.create('base', { ...opts, network: { allowOut: [site], denyOut: ['0.0.0.0/0'], rules } })
assert.ok((await get(box, `https://${site}/js-first`)).stdout.includes('you sent'))
assert.ok(!(await get(box, `https://${site}/js-echo`)).stdout.includes(process.env.VALUE), 'the answer holds the key')
assert.equal((await box.commands.run('env; cat /proc/*/environ 2>/dev/null | tr "\\0" "\\n"')).stdout.includes(process.env.VALUE), false)
await refused(box, `https://${other}/js-refused`)
assert.deepEqual(Object.keys((await box.getInfo()).network.rules[site][0].transform.headers).toSorted(), ['Authorization', 'X-Team'])
say('headers')

await Secret.update('js-key', process.env.VALUE + '2')
for (let i = 0; i < 20; i++) await get(box, `https://${site}/js-rotated`) // the test wants the new one among them
say('rotated')

await box.updateNetwork({ allowOut: [other], denyOut: ['0.0.0.0/0'] })
await get(box, `https://${other}/js-updated`)
await refused(box, `https://${site}/js-refused`)
await box.updateNetwork({ allowOut: [site], denyOut: ['0.0.0.0/0'], rules })
await get(box, `https://${site}/js-again`)
await Secret.destroy('js-key')
for (let i = 0; ; i++) {
  const { stdout } = await box.commands.run(`curl -sS -m 30 -o /dev/null -w '%{http_code}' https://${site}/js-destroyed`)
  if (stdout === '502') break
  assert.ok(i < 200, `without the secret: ${stdout}`)
}
await box.kill()
say('updated')

box = await Sandbox.create('base', { ...opts, allowInternetAccess: false })
await refused(box, `https://${site}/js-refused`)
await box.kill()
box = await Sandbox.create('base', { ...opts, network: { denyOut: ['93.184.215.99'] } })
await get(box, `https://${site}/js-open`)
await refused(box, `https://${other}/js-refused`)
await box.kill()
say('access')
