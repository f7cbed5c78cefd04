// Package mcp serves sandboxes as tools of the Model Context Protocol, over stdio and streamable HTTP.
//
// Every tool is a call or two of the native API, made through package client with the API key that the
// caller showed: what a key may do is decided where it always is. An MCP session has a sandbox of its
// own, made by the first tool that names no other and deleted when the session ends.
//
// What belongs here: names, schemas and texts of tools, and how results are cut and shown to a model.
// What does not: decisions about sandboxes, processes and files; those are the API's and the domain's.
package mcp
