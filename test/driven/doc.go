// Package driven attacks a server's interfaces and what its helpers do, from outside of a sandbox and with its code's help,
// on every isolation backend: the cases of the battery that no program inside can try alone.
//
// What belongs here: cases of section E that are about the real program with real walls, and what others do to the server itself.
// What does not: what one package decides alone, which is tested beside it; test/battery lists where.
package driven
