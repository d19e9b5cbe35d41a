package main

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

const folder = "../../fleet/kubernetes/"

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// daemonSet returns the DaemonSet of baton.yaml.
func daemonSet(t *testing.T) *appsv1.DaemonSet {
	t.Helper()
	objects, err := decodeFile(folder + "baton.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, object := range objects {
		if set, ok := object.(*appsv1.DaemonSet); ok {
			return set
		}
	}
	t.Fatal("baton.yaml has no DaemonSet")
	return nil
}

// container returns the container of this name.
func container(t *testing.T, containers []corev1.Container, name string) corev1.Container {
	t.Helper()
	at := slices.IndexFunc(containers, func(one corev1.Container) bool { return one.Name == name })
	if at < 0 {
		t.Fatalf("there is no container %s", name)
	}
	return containers[at]
}

func TestManifestsAreDecoded(t *testing.T) {
	paths, err := filepath.Glob(folder + "*.yaml")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no manifest: %v", err)
	}
	for _, path := range paths {
		objects, err := decodeFile(path)
		if err != nil {
			t.Error(err)
		}
		if len(objects) == 0 {
			t.Errorf("%s has no object", path)
		}
	}
}

func TestWrongManifestsAreRefused(t *testing.T) {
	text := read(t, folder+"baton.yaml")
	for _, wrong := range [][2]string{
		{"hostPID: true", "hostPid: true"},
		{"hostPID: true", "hostPID: \"true\""},
		{"hostPID: true", "hostPID: true\n      hostPID: true"},
		{"privileged: true", "privilege: true"},
		{"maxUnavailable: 1", "maxUnavailabel: 1"},
		{"kind: DaemonSet", "kind: DaemonSets"},
		{"apiVersion: apps/v1", "apiVersion: apps/v2"},
	} {
		changed := strings.Replace(text, wrong[0], wrong[1], 1)
		if changed == text {
			t.Errorf("baton.yaml does not say %q", wrong[0])
		}
		if _, err := decode([]byte(changed)); err == nil {
			t.Errorf("%q is not refused", wrong[1])
		}
	}
}

func TestDaemonSetKeepsConnections(t *testing.T) {
	set := daemonSet(t)
	pod := set.Spec.Template.Spec
	if !maps.Equal(set.Spec.Selector.MatchLabels, set.Spec.Template.Labels) {
		t.Error("the selector does not match the pods")
	}
	rolling := set.Spec.UpdateStrategy.RollingUpdate
	if set.Spec.UpdateStrategy.Type != appsv1.RollingUpdateDaemonSetStrategyType || rolling == nil || rolling.MaxSurge != nil {
		t.Error("a second Baton would be started at the path of the first")
	}
	if !pod.HostPID || pod.HostNetwork || pod.HostIPC {
		t.Error("of the node's namespaces the pod has those of processes, and no others")
	}
	if grace := pod.TerminationGracePeriodSeconds; grace == nil || *grace < 300 {
		t.Error("there is less time for restoring connections than baton.service gives")
	}
	if pod.PriorityClassName != "system-node-critical" {
		t.Error("the pod may be evicted")
	}
	for _, one := range pod.Containers {
		if one.LivenessProbe != nil || one.StartupProbe != nil {
			t.Errorf("%s: a probe would kill what restores connections", one.Name)
		}
		if len(one.Resources.Limits) != 0 {
			t.Errorf("%s has limits", one.Name)
		}
	}
	up := container(t, pod.Containers, "up")
	if up.SecurityContext.Privileged == nil || !*up.SecurityContext.Privileged {
		t.Error("up does not have the node's control group namespace")
	}
	if metrics := container(t, pod.Containers, "metrics"); metrics.SecurityContext.Privileged != nil {
		t.Error("metrics needs no more than CAP_SYS_PTRACE")
	}
}

// capabilities returns the names after each match of a pattern, sorted and in small letters.
func capabilities(text string, pattern string) []string {
	var found []string
	for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		found = append(found, strings.ToLower(match[1]))
	}
	slices.Sort(found)
	return found
}

func TestCapabilitiesAreTheUnits(t *testing.T) {
	var bounds, given []string
	for line := range strings.Lines(read(t, "../../packaging/baton.service")) {
		if strings.HasPrefix(line, "CapabilityBoundingSet=") {
			bounds = append(bounds, capabilities(line, `CAP_(\w+)`)...)
		}
	}
	slices.Sort(bounds)
	for line := range strings.Lines(read(t, folder+"up")) {
		if strings.HasPrefix(line, "capabilities=") {
			given = append(given, capabilities(line, `\+(\w+)`)...)
		}
	}
	slices.Sort(given)
	if len(bounds) == 0 || !slices.Equal(bounds, given) {
		t.Errorf("the unit has %v, the script %v", bounds, given)
	}
}

func TestApplicationOptsIn(t *testing.T) {
	objects, err := decodeFile(folder + "web.yaml")
	if err != nil {
		t.Fatal(err)
	}
	pod := podsOf(objects)[0]
	if pod.Annotations["baton/offload"] != "true" {
		t.Error("the example does not opt in")
	}
	opt := container(t, pod.Spec.InitContainers, "baton")
	if from := opt.Env[0].ValueFrom; opt.Env[0].Name != "BATON_OFFLOAD" || from == nil || from.FieldRef.FieldPath != "metadata.annotations['baton/offload']" {
		t.Error("the init container does not read the annotation")
	}
	if image := container(t, daemonSet(t).Spec.Template.Spec.Containers, "up").Image; opt.Image != image {
		t.Errorf("the library is of %s, the Baton of %s", opt.Image, image)
	}
	// The directory of the socket is the node's: what is in a pod must not be able to put another socket there.
	for _, one := range append(slices.Clone(pod.Spec.InitContainers), pod.Spec.Containers...) {
		for _, mount := range one.VolumeMounts {
			if mount.MountPath == "/run/baton" && !mount.ReadOnly {
				t.Errorf("%s can write to the node's /run/baton", one.Name)
			}
		}
	}
}
