// Package testenv holds what tests need to meet a real kernel: gates that fail rather than skip, the
// guest built once, short run directories, checks that a test left nothing behind, and a process that removes what
// killed tests left.
//
// What belongs here: code that only tests call and that knows the host. What does not: assertions
// about one package's own behaviour, which stay beside that package.
//
// # Gates
//
// A missing privilege or kernel feature fails a test. Only one thing skips it: the running kernel is
// older than the minimum that the feature declares, and REQUIRE does not name the feature. REQUIRE
// is a comma-separated list of feature names, or "all"; the repository's own check sets it, so that
// a lost feature is red and never silent. No other code calls testing's Skip.
package testenv
