// Reads Kubernetes manifests as strictly as an API server can, and prints the pods of their workloads as a JSON array:
//
//	go run . FILE...
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	serializer "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// decode returns the objects of a file of YAML documents. A kind that is not known, a field that its type does not have (upper and lower
// case count), a value of another type and a key that is there twice are errors.
func decode(text []byte) ([]runtime.Object, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{appsv1.AddToScheme, corev1.AddToScheme, networkingv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	strict := serializer.SerializerOptions{Yaml: true, Strict: true}
	decoder := serializer.NewSerializerWithOptions(serializer.DefaultMetaFactory, scheme, scheme, strict)
	reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	var objects []runtime.Object
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		object, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", len(objects)+1, err)
		}
		objects = append(objects, object)
	}
}

// decodeFile returns the objects of a file.
func decodeFile(path string) ([]runtime.Object, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	objects, err := decode(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return objects, nil
}

// podsOf returns a pod of each workload, with the workload's name.
func podsOf(objects []runtime.Object) []corev1.Pod {
	var pods []corev1.Pod
	add := func(name string, template corev1.PodTemplateSpec) {
		pod := corev1.Pod{ObjectMeta: *template.ObjectMeta.DeepCopy(), Spec: *template.Spec.DeepCopy()}
		pod.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
		pod.Name = name
		pods = append(pods, pod)
	}
	for _, object := range objects {
		switch workload := object.(type) {
		case *appsv1.DaemonSet:
			add(workload.Name, workload.Spec.Template)
		case *appsv1.Deployment:
			add(workload.Name, workload.Spec.Template)
		}
	}
	return pods
}

func main() {
	pods := []corev1.Pod{}
	for _, path := range os.Args[1:] {
		objects, err := decodeFile(path)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		pods = append(pods, podsOf(objects)...)
	}
	if err := json.NewEncoder(os.Stdout).Encode(pods); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
