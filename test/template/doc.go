// Package template tests builds of templates against package registries that change: a Debian repository, a Python index
// and an npm registry of the tests' own, in a fake internet, and the real apt, pip and npm of this machine.
//
// What belongs here: what a build is made of when what it fetches moves. What does not: what needs no registry, which
// test/script and package internal/template show.
package template
