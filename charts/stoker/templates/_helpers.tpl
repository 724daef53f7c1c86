{{- define "stoker.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* A release may have dots in its name, a Service may not. */}}
{{- define "stoker.fullname" -}}
{{- $release := .Release.Name | replace "." "-" }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "stoker.name" .) $release }}
{{- $release | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" $release (include "stoker.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* {whole, part} -> the name of a Service; other objects may have a release's name that begins with a digit. */}}
{{- define "stoker.serviceName" -}}
{{- $name := printf "%s-%s" (include "stoker.fullname" .whole) .part }}
{{- if not (regexMatch "^[a-z]" $name) }}
{{- fail (printf "the Service %s would begin with a digit, which Kubernetes refuses: use another release name than %s, or set fullnameOverride, for instance to stoker-%s" $name .whole.Release.Name (replace "." "-" .whole.Release.Name)) }}
{{- end }}
{{- $name }}
{{- end }}

{{/* Names of what is not in a namespace: two releases of the same name in two namespaces do not meet. */}}
{{- define "stoker.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "stoker.fullname" .) }}
{{- end }}

{{- define "stoker.selectorLabels" -}}
app.kubernetes.io/name: {{ include "stoker.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "stoker.labels" -}}
{{ include "stoker.selectorLabels" . }}
app.kubernetes.io/part-of: stoker
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "stoker.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "stoker.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed with serviceAccount.create=false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* {image, chart} -> reference; a digest wins over a tag, no tag means the version of the chart's program. */}}
{{- define "stoker.image" -}}
{{- if .image.digest }}
{{- printf "%s@%s" .image.repository .image.digest }}
{{- else }}
{{- printf "%s:%s" .image.repository (default .chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{/* {field, values, own} -> the labels or annotations of a value; a key that the chart itself writes is refused. */}}
{{- define "stoker.added" -}}
{{- $own := fromYaml .own }}
{{- range $key, $_ := .values }}
{{- if hasKey $own $key }}
{{- fail (printf "%s: the chart itself sets %s; give other keys only" $.field $key) }}
{{- end }}
{{- end }}
{{- toYaml .values }}
{{- end }}

{{/* The operator refuses such a configuration at its start, when the rollout already waits for it. */}}
{{- define "stoker.checkLease" -}}
{{- $retry := float64 .retry_s }}
{{- $renew := float64 .renew_deadline_s }}
{{- $duration := float64 .duration_s }}
{{- if not (and (lt $retry $renew) (lt $renew $duration)) }}
{{- fail (printf "leaderElection: retrySeconds < renewDeadlineSeconds < durationSeconds is needed, got %v, %v and %v" $retry $renew $duration) }}
{{- end }}
{{- end }}

{{/* The operator's configuration file; `.Values.config` has the last word, for what other templates make of it, too. */}}
{{- define "stoker.config" -}}
{{- $controlKey := dict "secret" .Values.controlKey.secret "rotate_days" .Values.controlKey.rotateDays }}
{{- if .Values.controlKey.existingSecret }}
{{- $controlKey = dict "folder" "/etc/stoker-control-key" }}
{{- end }}
{{- $config := dict
  "namespace" .Release.Namespace
  "namespaces" .Values.watch.namespaces
  "api" (dict "qps" .Values.api.qps "burst" .Values.api.burst)
  "listen" (dict "host" "0.0.0.0" "port" 8080)
  "lease" (dict "name" (include "stoker.fullname" .) "duration_s" .Values.leaderElection.durationSeconds "renew_deadline_s" .Values.leaderElection.renewDeadlineSeconds "retry_s" .Values.leaderElection.retrySeconds)
  "control_key" $controlKey
  "images" (dict
    "runtime" (include "stoker.image" (dict "image" .Values.images.runtime "chart" .Chart))
    "control" (include "stoker.image" (dict "image" .Values.images.control "chart" .Chart))
    "pull_policy" .Values.images.pullPolicy
    "pull_secrets" .Values.workloads.imagePullSecrets)
  "routers" (dict "resources" .Values.workloads.routers.resources)
  "tasks" (dict "resources" .Values.workloads.tasks.resources "deadline_s" .Values.workloads.tasks.deadlineSeconds)
  "pods" (dict "drain_timeout_s" .Values.workloads.drainTimeoutSeconds "node_lost_s" .Values.workloads.nodeLostSeconds
    "node_outage_share" .Values.workloads.nodeOutageShare "node_outage_nodes" .Values.workloads.nodeOutageNodes
    "zone_outage_s" .Values.workloads.zoneOutageSeconds
    "elastic_patience_s" .Values.workloads.elastic.patienceSeconds "elastic_rest_s" .Values.workloads.elastic.restSeconds)
  "watch" (dict "secrets" .Values.watch.secrets "nodes" .Values.watch.nodes "pods" .Values.watch.pods)
  "network_policies" (dict "enabled" .Values.networkPolicy.workloads "metrics_from" .Values.networkPolicy.metricsFrom)
  "log_level" .Values.log.level
  "log_format" .Values.log.format
}}
{{- $config = mergeOverwrite $config (deepCopy .Values.config) }}
{{- include "stoker.checkLease" $config.lease }}
{{- toPrettyJson $config }}
{{- end }}

{{/* Rights of the operator in each namespace whose resources it reconciles; of its configuration. */}}
{{- define "stoker.workloadRules" -}}
- apiGroups: [stoker.dev]
  resources: [trainingjobs, checkpoints, inferencedeployments, enginepools]
  verbs: [get, list, watch, patch]
- apiGroups: [stoker.dev]
  resources: [checkpoints, enginepools]
  verbs: [create, delete]
- apiGroups: [stoker.dev]  # ttlSecondsAfterFinished
  resources: [trainingjobs]
  verbs: [delete]
- apiGroups: [stoker.dev]
  resources: [trainingjobs/status, checkpoints/status, inferencedeployments/status, enginepools/status, enginepools/scale]
  verbs: [get, update, patch]
- apiGroups: [stoker.dev]  # owner references that block deletion
  resources: [trainingjobs/finalizers, checkpoints/finalizers, inferencedeployments/finalizers, enginepools/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods, services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]  # to name a missing claim
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch]
{{- if .watch.secrets }}
- apiGroups: [""]  # to name a missing Secret; Kubernetes cannot grant the names without the content
  resources: [secrets]
  verbs: [list, watch]
{{- end }}
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]  # the key of prefill and decode pools, which it cannot read
  verbs: [create]
- apiGroups: [scheduling.volcano.sh, scheduling.k8s.io]  # gangs of jobs and replicas of engines whose scheduling.backend needs them
  resources: [podgroups]
  verbs: [get, create, patch]
{{- end }}

{{- define "stoker.gatewaySelector" -}}
app.kubernetes.io/name: {{ include "stoker.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{- define "stoker.gatewayLabels" -}}
{{ include "stoker.gatewaySelector" . }}
app.kubernetes.io/part-of: stoker
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The gateway's configuration file. */}}
{{- define "stoker.gatewayConfig" -}}
{{- $config := dict
  "listen" (dict "host" "0.0.0.0" "port" 8080)
  "cluster" (dict "kind" "kubernetes" "audiences" .Values.gateway.audiences "passed_extras" .Values.gateway.impersonate.extras)
  "namespace" .Values.gateway.namespace
  "log_level" .Values.log.level
}}
{{- with .Values.gateway.prometheusUrl }}
{{- $_ := set $config "prometheus_url" . }}
{{- end }}
{{- $config | toPrettyJson }}
{{- end }}
