// Package archtest keeps the shape of the repository, as tests that read its source: which package
// may import which, what every package and export must say about itself, and what no file holds.
//
// What belongs here: rules about all packages. What does not: a rule about one package's behaviour,
// which stands in that package's tests. Each failure says why the rule is there; docs/architecture.md
// says the same to people, and .golangci.yml to editors.
package archtest
