package store

import "context"

// ModelUsage is one row of model_usage: what a sandbox has used of a model provider.
type ModelUsage struct {
	Sandbox             string
	Provider            string
	Requests            int64
	TokensIn, TokensOut int64
}

const addModelUsage = `INSERT INTO model_usage (sandbox, provider, requests, tokens_in, tokens_out) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (sandbox, provider) DO UPDATE SET requests = requests + excluded.requests,
tokens_in = tokens_in + excluded.tokens_in, tokens_out = tokens_out + excluded.tokens_out`

// AddModelUsage adds to what a sandbox has used.
func AddModelUsage(u ModelUsage) Write {
	return Func(func(tx *Tx) error {
		return tx.exec(addModelUsage, u.Sandbox, u.Provider, u.Requests, u.TokensIn, u.TokensOut)
	})
}

// ModelUsages returns what a sandbox has used, by provider.
func (db *DB) ModelUsages(ctx context.Context, sandbox string) (map[string]ModelUsage, error) {
	all := make(map[string]ModelUsage)
	const query = "SELECT sandbox, provider, requests, tokens_in, tokens_out FROM model_usage WHERE sandbox = ?"
	err := db.each(ctx, query, []any{sandbox}, func(r scanner) error {
		var u ModelUsage
		err := r.Scan(&u.Sandbox, &u.Provider, &u.Requests, &u.TokensIn, &u.TokensOut)
		all[u.Provider] = u
		return err
	})
	return all, err
}
