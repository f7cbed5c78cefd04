// Preloaded where the machine's resolver does not know it: every name below localhost leads to the machine itself
// (RFC 6761), as systemd's resolver and browsers have it.
const dns = require('node:dns')
const lookup = dns.lookup
dns.lookup = (name, options, done) => {
  if (!name.endsWith('.localhost')) return lookup(name, options, done)
  const [opts, reply] = typeof options === 'function' ? [{}, options] : [options, done]
  process.nextTick(() => (opts?.all ? reply(null, [{ address: '127.0.0.1', family: 4 }]) : reply(null, '127.0.0.1', 4)))
}
