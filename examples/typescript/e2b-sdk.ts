// E2B's SDK, pointed at a Casemate server by three settings: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY.
import { CommandExitError, Sandbox } from 'e2b'

const box = await Sandbox.create({ timeoutMs: 600_000, envs: { GREETING: 'hello' } })
try {
  console.log((await box.commands.run('echo "$GREETING from $(uname -s)"')).stdout.trim())

  await box.files.write('/home/user/app/main.py', "print('written by the SDK')\n")
  console.log((await box.commands.run('python3 main.py', { cwd: '/home/user/app' })).stdout.trim())

  try {
    await box.commands.run('echo oops >&2; exit 4')
  } catch (e) {
    if (!(e instanceof CommandExitError)) throw e
    console.log('exit code:', e.exitCode, e.stderr.trim())
  }

  // In the background: found again by its process id, with all of its output.
  const started = await box.commands.run('for i in 1 2 3; do echo tick $i; sleep 0.2; done', { background: true })
  const again = await box.commands.connect(started.pid)
  console.log((await again.wait()).stdout.trim().split('\n').join(', '))
} finally {
  await box.kill()
}
console.log('running:', await box.isRunning())
