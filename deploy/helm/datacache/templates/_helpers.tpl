{{- /* Only what Go's text/template has, and what scripts/render_manifests.py, which renders this without Helm, puts in its place. */ -}}
{{- define "datacache.labels" }}
    app.kubernetes.io/name: datacache
    app.kubernetes.io/instance: {{ .Release.Name }}
    app.kubernetes.io/managed-by: {{ .Release.Service }}
    app.kubernetes.io/version: {{ printf "%q" .Values.image.tag }}
{{- end }}
{{- define "datacache.image" -}}
{{- template "datacache.image-name" (dict "global" .Values.global "image" .Values.image) }}
{{- end }}
{{- /* Of any image: a text is its whole name. */ -}}
{{- define "datacache.image-name" -}}
{{- if eq (printf "%T" .image) "string" }}{{ printf "%q" .image }}{{ else -}}
{{- $registry := .image.registry }}{{ with .global }}{{ with .registry }}{{ $registry = . }}{{ end }}{{ end -}}
"{{ with $registry }}{{ . }}/{{ end }}{{ .image.repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag }}{{ end }}"
{{- end }}
{{- end }}
{{- /* What of the Secrets makes pods start again: a new version of one. Not what is in them, which a hash would give away. */ -}}
{{- define "datacache.secrets" }}
{{- if .Values.restartOnSecretChange -}}
"datacache.io/secrets": "
{{- with .Values.stores.secret }}{{ with (lookup "v1" "Secret" $.Release.Namespace .) }}{{ .metadata.resourceVersion }}{{ end }}{{ end }}/
{{- with .Values.catalog.secret }}{{ with (lookup "v1" "Secret" $.Release.Namespace .) }}{{ .metadata.resourceVersion }}{{ end }}
{{- else }}{{ with (lookup "v1" "Secret" $.Release.Namespace .Values.mongodb.secret) }}{{ .metadata.resourceVersion }}{{ end }}{{ end }}/
{{- if .Values.cluster }}{{ if .Values.cluster.enabled }}
{{- with (lookup "v1" "Secret" $.Release.Namespace .Values.cluster.keySecret) }}{{ .metadata.resourceVersion }}{{ end }}/
{{- with .Values.cluster.tlsSecret }}{{ with (lookup "v1" "Secret" $.Release.Namespace .) }}{{ .metadata.resourceVersion }}{{ end }}{{ end }}
{{- end }}{{ end }}"
{{- end }}
{{- end }}
{{- define "datacache.pods" }}
      {{- with .Values.dnsPolicy }}
      dnsPolicy: {{ . }}
      {{- end }}
      {{- with .Values.dnsConfig }}
      dnsConfig: {{ toJson . }}
      {{- end }}
{{- end }}
{{- define "datacache.environment" }}
            - {name: HOME, value: /tmp}
            - {name: DATACACHE_HOME, value: {{ printf "%q" .Values.home }}}
            {{- if .Values.catalog.secret }}
            - name: DATACACHE_CATALOG
              valueFrom: {secretKeyRef: {name: {{ printf "%q" .Values.catalog.secret }}, key: DATACACHE_CATALOG}}
            {{- else if .Values.catalog.url }}
            - {name: DATACACHE_CATALOG, value: {{ printf "%q" .Values.catalog.url }}}
            {{- else }}
            - name: MONGODB_PASSWORD
              valueFrom: {secretKeyRef: {name: {{ printf "%q" .Values.mongodb.secret }}, key: password}}
            - name: DATACACHE_CATALOG
              value: mongodb://datacache:$(MONGODB_PASSWORD)@{{ .Release.Name }}-mongodb.{{ .Release.Namespace }}.svc/datacache?authSource=admin
            {{- end }}
            {{- with .Values.logLevel }}
            - {name: DATACACHE_LOG_LEVEL, value: {{ . }}}
            {{- end }}
            {{- range .Values.extraEnv }}
            - {{ toJson . }}
            {{- end }}
            {{- range $name, $value := .Values.settings }}
            - {name: {{ $name }}, value: {{ printf "%q" $value }}}
            {{- end }}
{{- end }}
{{- define "datacache.node-environment" }}
            {{- template "datacache.environment" . }}
            # These containers are each other's: nobody starts a daemon of its own, and mounts live in the mounts' container.
            - {name: DATACACHE_DAEMON, value: external}
            - {name: DATACACHE_MOUNT_HOST, value: {{ printf "%q" (printf "%s/run/mounts.sock" .Values.home) }}}
            # By which the daemon tells the catalog what this node holds, and by which other nodes know it.
            - name: DATACACHE_NODE
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- end }}
{{- define "datacache.cluster-environment" }}
            {{- if and .Values.cluster .Values.cluster.enabled }}
            - name: POD_IP
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
            - {name: DATACACHE_LISTEN, value: "[$(POD_IP)]:{{ .Values.cluster.port }}"}
            - {name: DATACACHE_CLUSTER, value: {{ printf "%q" .Values.cluster.name }}}
            - {name: DATACACHE_CLUSTER_KEY_FILE, value: /etc/datacache/cluster/key}
            - {name: DATACACHE_CLUSTER_MODE, value: {{ printf "%q" .Values.cluster.mode }}}
            {{- if .Values.cluster.tlsSecret }}
            - {name: DATACACHE_CLUSTER_TLS, value: /etc/datacache/cluster-tls}
            {{- end }}
            {{- if .Values.cluster.zone }}
            - {name: DATACACHE_ZONE, value: {{ printf "%q" .Values.cluster.zone }}}
            {{- else }}
            # Kubernetes 1.35 and newer give a pod this label of its node. Without it the value is empty, and no zone.
            - name: DATACACHE_ZONE
              valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
            {{- end }}
            {{- end }}
{{- end }}
{{- define "datacache.cluster-mounts" }}
            {{- if and .Values.cluster .Values.cluster.enabled }}
            - {name: cluster-key, mountPath: /etc/datacache/cluster, readOnly: true}
            {{- if .Values.cluster.tlsSecret }}
            - {name: cluster-tls, mountPath: /etc/datacache/cluster-tls, readOnly: true}
            {{- end }}
            {{- end }}
{{- end }}
{{- define "datacache.stores" }}
          {{- if .Values.stores.secret }}
          envFrom:
            - secretRef: {name: {{ printf "%q" .Values.stores.secret }}, optional: true}
          {{- end }}
{{- end }}
{{- define "datacache.node-mounts" }}
            - {name: home, mountPath: {{ printf "%q" .Values.home }}, mountPropagation: Bidirectional}
            - {name: shm, mountPath: /dev/shm}
            - {name: tmp, mountPath: /tmp}
{{- end }}
