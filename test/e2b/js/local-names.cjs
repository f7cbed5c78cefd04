// Preloaded where the machine's resolver does not know it: every name below localhost leads to the machine itself
// (RFC 6761), as systemd's resolver and browsers have it. So does every name below SUITES_DOMAIN.
const dns = require('node:dns')
const lookup = dns.lookup
const local = ['.localhost', process.env.SUITES_DOMAIN].filter(Boolean)
dns.lookup = (name, options, done) => {
  if (!local.some((end) => name.endsWith(end))) return lookup(name, options, done)
  const [opts, reply] = typeof options === 'function' ? [{}, options] : [options, done]
  process.nextTick(() => (opts?.all ? reply(null, [{ address: '127.0.0.1', family: 4 }]) : reply(null, '127.0.0.1', 4)))
}
