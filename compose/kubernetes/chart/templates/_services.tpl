{{/* Parts of the pods of routers and nodes. All take a dict: root, role, of (the values of the role). */}}

{{/* Options as environment variables; those of the role come last. */}}
{{- define "kvrelay.options" -}}
{{- range $name, $value := merge (dict) .of.options .root.Values.options }}
{{- if has ($name | replace "-" "_") (list "port" "host" "admin_port" "admin_host" "admin_token" "advertise_host" "data_port" "node_id" "cluster" "allowed_hosts" "redis_url" "model" "tls_dir" "tensor_parallel_size" "pipeline_parallel_size" "nnodes" "node_rank" "master_addr" "master_port") }}
{{- fail (printf "options.%s: the chart sets this option from a value of its own" $name) }}
{{- end }}
- name: KVRELAY_{{ $name | replace "-" "_" | upper }}
  value: {{ if kindIs "slice" $value }}{{ $value | toJson | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end }}

{{/* Environment of every service of kvrelay. */}}
{{- define "kvrelay.environment" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if .root.Values.redis.included }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "kvrelay.secret" .root }}, key: redis-password}}
- name: KVRELAY_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "kvrelay.name" .root }}-redis:6379/0
{{- else }}
- name: KVRELAY_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ required "redis.urlSecret names the Secret with the URL of an external Redis" .root.Values.redis.urlSecret }}, key: url}}
{{- end }}
- name: KVRELAY_ADMIN_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "kvrelay.secret" .root }}, key: admin-token}}
- name: KVRELAY_ADMIN_URL
  value: {{ ternary "https" "http" .root.Values.tls.enabled }}://{{ eq .role "router" | ternary "127.0.0.1" (printf "%s-admin" (include "kvrelay.name" .root)) }}:{{ .root.Values.router.adminPort }}
- name: KVRELAY_CLUSTER
  value: {{ include "kvrelay.name" .root }}
- name: KVRELAY_MODEL
  value: {{ .root.Values.model | quote }}
- name: KVRELAY_HOST
  value: 0.0.0.0
- name: KVRELAY_PORT
  value: {{ .of.port | quote }}
- name: KVRELAY_ADMIN_HOST
  value: 0.0.0.0
- name: KVRELAY_ADMIN_PORT
  value: {{ .of.adminPort | quote }}
- name: KVRELAY_CACHE
  value: /tmp/kvrelay
{{- if .root.Values.tls.enabled }}
- name: KVRELAY_TLS_DIR
  value: /keys/{{ .role }}
{{- end }}
{{- end }}

{{- define "kvrelay.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: models, mountPath: /models}
{{- if .root.Values.tls.enabled }}
- {name: keys, mountPath: /keys/{{ .role }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "kvrelay.volumes" -}}
- name: tmp
  emptyDir: {}
- name: models
{{- if .root.Values.models.claim }}
  persistentVolumeClaim: {claimName: {{ .root.Values.models.claim }}}
{{- else if .root.Values.models.hostPath }}
  hostPath: {path: {{ .root.Values.models.hostPath }}, type: Directory}
{{- else }}
  emptyDir: {}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: keys
  secret: {secretName: {{ get .root.Values.tls.secrets .role }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* Of every pod, with the grace for the drain in the preStop hook. */}}
{{- define "kvrelay.pod" -}}
# Without the variables of other Services, which are no options.
enableServiceLinks: false
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ add .root.Values.drainSeconds 60 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "kvrelay.selector" . | nindent 8 }}
{{- end }}

{{/* Image and rights of every container of kvrelay. */}}
{{- define "kvrelay.container" -}}
image: {{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- with .of.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kvrelay.podMetadata" -}}
labels:
  {{- include "kvrelay.labels" . | nindent 2 }}
{{- with .of.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
