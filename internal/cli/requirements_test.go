package cli

import "testing"

func TestRequirementsOf(t *testing.T) {
	got, err := requirementsOf(`{"steps":[{"text":"RUN a"},{"brings":[
		{"manager":"pip","name":"b-lib","version":"1!2.0+x"},{"manager":"dpkg","name":"curl","version":"7"},
		{"manager":"pip","name":"-r","version":"1"},{"manager":"pip","name":"x","version":"1\\n-r y"},{"manager":"pip","name":"y z","version":"1"}]},
		{"brings":[{"manager":"pip","name":"a","version":"1"},{"manager":"pip","name":"b-lib","version":"1!2.0+x"}]}]}`)
	if want := "a==1\nb-lib==1!2.0+x\n"; err != nil || got != want {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
	for _, bad := range []string{"", "{"} {
		if _, err := requirementsOf(bad); err == nil {
			t.Errorf("%q is a lock file", bad)
		}
	}
}
